"""colo bench: what the parts of a step cost, beside what the machine can do and beside other ways."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from colo.commands.arguments import Commands, Parser, run_named
from colo.commands.launch import become_torchrun, check_ranks, count_gpus, torchrun
from colo.config import DTYPES, PolicyConfig

SHAPES = ("qwen3-0.6b", "qwen3-8b", "qwen3-moe-64", "tiny", "tiny-moe")
"""Models with random weights; the tiny ones are of colo's own, for a machine without a GPU."""
RELOAD = "colo.commands.bench_reload"


@dataclass(frozen=True, kw_only=True)
class ReloadOptions:
    """What `colo bench reload` was asked for."""

    model: str
    """A folder, or empty."""
    shape: str
    """One of SHAPES, or empty."""
    policy_dtype: str
    dtype: str
    """The engine's."""
    num_repeats: int
    num_ranks: int | None
    """None where it was left out."""
    json_file: Path | None


def bench_command(arguments: list[str]) -> None:
    """Launch a benchmark, which does not return; list them where none is named.

    Raises:
        ValueError: no such benchmark, or an option of it is wrong.
    """
    run_named("benchmark", "bench", BENCHMARKS, arguments)


def launch_reload(arguments: list[str]) -> None:
    """Become torchrun of the benchmark's module; with --help, print its options.

    Raises:
        ValueError: an option is wrong.
    """
    if {"-h", "--help"} & set(arguments):
        reload_parser().print_help()
        return
    become_torchrun(reload_command(arguments, count_gpus()))


def reload_command(arguments: list[str], num_gpus: int) -> list[str]:
    """The command line that launches the benchmark on this host.

    Raises:
        ValueError: an option is wrong, or there are fewer GPUs than ranks.
    """
    ranks = read_reload_options(arguments).num_ranks or 1
    check_ranks(ranks, num_gpus)
    return torchrun(RELOAD, arguments, ranks)


def read_reload_options(arguments: list[str]) -> ReloadOptions:
    """The options, checked as far as that goes without a model.

    Raises:
        ValueError: an option that is unknown or wrong.
    """
    given = reload_parser().parse_args(arguments)
    if bool(given.model) == bool(given.shape):
        raise ValueError(f"--model or --shape must be given, and not both, got {given.model!r} and {given.shape!r}")
    if given.model and not (Path(given.model) / "config.json").is_file():
        raise ValueError(f"--model must be a folder that holds config.json, got {given.model!r}")
    if given.shape:
        _one_of("--shape", given.shape, SHAPES)
    _one_of("--policy-dtype", given.policy_dtype, DTYPES)
    _one_of("--dtype", given.dtype, DTYPES)
    if given.json and not Path(given.json).absolute().parent.is_dir():
        raise ValueError(f"--json must be a file in a folder that exists, got {given.json!r}")
    return ReloadOptions(
        model=given.model,
        shape=given.shape,
        policy_dtype=given.policy_dtype,
        dtype=given.dtype,
        num_repeats=_count("--repeats", given.repeats),
        num_ranks=_count("--ranks", given.ranks) if given.ranks else None,
        json_file=Path(given.json) if given.json else None,
    )


def reload_parser() -> argparse.ArgumentParser:
    """What `colo bench reload` takes; values are checked later, so that all refusals read alike."""
    usual = PolicyConfig()
    parser = Parser(prog="colo bench reload", description=BENCHMARKS["reload"][1])
    parser.add_argument("--model", default="", metavar="FOLDER", help="a model in the Hugging Face layout")
    parser.add_argument("--shape", default="", help=f"instead, random weights: {', '.join(SHAPES)}")
    parser.add_argument("--policy-dtype", default=usual.dtype, help="float32 or bfloat16 (default %(default)s)")
    parser.add_argument("--dtype", default=usual.compute_dtype, help="the engine's (default %(default)s)")
    parser.add_argument("--repeats", default="20", help="runs of each fast way (default %(default)s)")
    parser.add_argument("--ranks", default="", help="processes on this host, which share the policy (default 1)")
    parser.add_argument("--json", default="", metavar="FILE", help="write every number there too")
    return parser


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}, got {value!r}")


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{option} must be a whole number of at least 1, got {text!r}")
    return int(text)


BENCHMARKS: Commands = {
    "reload": (launch_reload, "write a policy's weights into an engine, by each way that there is"),
}
