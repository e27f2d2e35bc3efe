"""colo replay: train again on a rollout that a run saved, from the weights it had then, without an engine."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from colo.commands.arguments import Parser, whole_number
from colo.commands.launch import RANKS_WITHOUT_GPU, become_torchrun, check_ranks, count_gpus, torchrun
from colo.resume import CONFIG, rollout_path

REPLAY = "colo.commands.replay_step"


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """What `colo replay` was asked for."""

    run_dir: Path
    step: int
    num_ranks: int | None
    """None where it was left out."""


def replay_command(arguments: list[str]) -> None:
    """Become torchrun of the replay; with --help, print its options.

    Raises:
        ValueError: an option is wrong, or the run cannot replay that step.
    """
    if {"-h", "--help"} & set(arguments):
        replay_parser().print_help()
        return
    become_torchrun(replay_torchrun(arguments, count_gpus()))


def replay_torchrun(arguments: list[str], num_gpus: int) -> list[str]:
    """The command line that launches the replay on this host.

    Raises:
        ValueError: as `read_replay_options`, or there are fewer GPUs than ranks.
    """
    ranks = read_replay_options(arguments).num_ranks or num_gpus or RANKS_WITHOUT_GPU
    check_ranks(ranks, num_gpus)
    return torchrun(REPLAY, arguments, ranks)


def read_replay_options(arguments: list[str]) -> ReplayOptions:
    """The options, checked against what the run has on disk.

    Raises:
        ValueError: an option is wrong, or the run cannot replay that step; it names those that it can.
    """
    given = replay_parser().parse_args(arguments)
    run_dir = Path(given.run_dir)
    if not (run_dir / CONFIG).is_file():
        raise ValueError(f"RUN_DIR must be a folder that holds the {CONFIG} of its run, got {given.run_dir!r}")
    steps = replayable_steps(run_dir)
    if not given.step.isdecimal() or int(given.step) not in steps:
        those = ", ".join(map(str, steps)) or "none: rollout.save of the run says which are saved"
        raise ValueError(f"--step must be one with a rollout and its checkpoint ({those}), got {given.step!r}")
    num_ranks = whole_number("--ranks", given.ranks) if given.ranks else None
    return ReplayOptions(run_dir=run_dir, step=int(given.step), num_ranks=num_ranks)


def replayable_steps(run_dir: Path) -> list[int]:
    """Steps whose rollout is on disk, with the weights before them: a checkpoint, or, of step 0, the model itself."""
    names = (path.stem.removeprefix("step-") for path in (run_dir / "rollouts").glob("step-*.jsonl"))
    steps = sorted(int(name) for name in names if name.isdecimal())
    return [
        step for step in steps if rollout_path(run_dir, step).is_file() and (not step or _has_weights(run_dir, step))
    ]


def replay_parser() -> argparse.ArgumentParser:
    """What `colo replay` takes; values are checked later, so that all refusals read alike."""
    parser = Parser(
        prog="colo replay",
        description="Train on a saved rollout, without an engine; print the step's metrics as one JSON line.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="of a run with rollout.save")
    parser.add_argument("--step", required=True, metavar="N", help="the step whose rollout is trained on")
    parser.add_argument(
        "--ranks",
        default="",
        help="processes on this host (default: its GPUs; 2 where there is none); with as many "
        "as the run had, the numbers are the run's",
    )
    return parser


def _has_weights(run_dir: Path, step: int) -> bool:
    return (run_dir / "checkpoints" / f"step-{step}").is_dir()
