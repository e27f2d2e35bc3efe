"""colo bench: what the parts of a step cost, beside what the machine can do and beside other ways."""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colo.commands.arguments import Commands, Parser, run_named, whole_number
from colo.commands.launch import become_torchrun, check_ranks, count_gpus, torchrun
from colo.config import DEPTHS, DTYPES, PolicyConfig

SHAPES = ("qwen3-0.6b", "qwen3-8b", "qwen3-moe-64", "tiny", "tiny-moe")
"""Models with random weights; the tiny ones are of colo's own, for a machine without a GPU."""
RELOAD, SWITCH = "colo.commands.bench_reload", "colo.commands.bench_switch"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What every benchmark is asked for."""

    model: str
    """A folder, or empty."""
    shape: str
    """One of SHAPES, or empty."""
    policy_dtype: str
    dtype: str
    """The engine's."""
    num_ranks: int | None
    """None where it was left out."""
    json_file: Path | None


@dataclass(frozen=True, kw_only=True)
class ReloadOptions(ModelOptions):
    """What `colo bench reload` was asked for."""

    num_repeats: int


@dataclass(frozen=True, kw_only=True)
class SwitchOptions(ModelOptions):
    """What `colo bench switch` was asked for."""

    depths: list[str]
    """Of DEPTHS."""
    idle_s: list[float]
    """Seconds between a sleep and its wake."""
    num_cycles: int
    kv_bytes: int | None
    """None where it was left out."""
    step_s: float | None
    """A step's seconds, of which the switch takes a share; None where it was left out."""


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
    _launch(arguments, reload_parser, reload_command)


def launch_switch(arguments: list[str]) -> None:
    """As `launch_reload`.

    Raises:
        ValueError: an option is wrong.
    """
    _launch(arguments, switch_parser, switch_command)


def reload_command(arguments: list[str], num_gpus: int) -> list[str]:
    """The command line that launches the benchmark on this host.

    Raises:
        ValueError: an option is wrong, or there are fewer GPUs than ranks.
    """
    return _command(RELOAD, arguments, read_reload_options(arguments).num_ranks, num_gpus)


def switch_command(arguments: list[str], num_gpus: int) -> list[str]:
    """As `reload_command`.

    Raises:
        ValueError: an option is wrong, or there are fewer GPUs than ranks.
    """
    return _command(SWITCH, arguments, read_switch_options(arguments).num_ranks, num_gpus)


def read_reload_options(arguments: list[str]) -> ReloadOptions:
    """The options, checked as far as that goes without a model.

    Raises:
        ValueError: an option that is unknown or wrong.
    """
    given = reload_parser().parse_args(arguments)
    return ReloadOptions(**_model_options(given), num_repeats=whole_number("--repeats", given.repeats))


def read_switch_options(arguments: list[str]) -> SwitchOptions:
    """As `read_reload_options`.

    Raises:
        ValueError: an option that is unknown or wrong.
    """
    given = switch_parser().parse_args(arguments)
    depths = given.depths.split(",")
    for depth in depths:
        _one_of("--depths", depth, DEPTHS)
    if given.step_s and given.run:
        raise ValueError(f"--step-s or --run may be given, and not both, got {given.step_s!r} and {given.run!r}")
    if given.run and not (Path(given.run) / "metrics.jsonl").is_file():
        raise ValueError(f"--run must be a run_dir that holds metrics.jsonl, got {given.run!r}")
    step_s = _number("--step-s", given.step_s) if given.step_s else None
    return SwitchOptions(
        **_model_options(given),
        depths=list(dict.fromkeys(depths)),
        idle_s=[_number("--idle", seconds, may_be_0=True) for seconds in given.idle.split(",")],
        num_cycles=whole_number("--cycles", given.cycles),
        kv_bytes=int(_number("--kv-gib", given.kv_gib) * 2**30) if given.kv_gib else None,
        step_s=_median_step_s(given.run) if given.run else step_s,
    )


def reload_parser() -> argparse.ArgumentParser:
    """What `colo bench reload` takes; values are checked later, so that all refusals read alike."""
    parser = _model_parser("reload")
    parser.add_argument("--repeats", default="20", help="runs of each fast way (default %(default)s)")
    return parser


def switch_parser() -> argparse.ArgumentParser:
    """What `colo bench switch` takes."""
    parser = _model_parser("switch")
    parser.add_argument("--depths", default=",".join(DEPTHS), help="of sleep (default %(default)s)")
    parser.add_argument(
        "--idle", default="0,1", metavar="SECONDS", help="asleep in each cycle, one row each (default %(default)s)"
    )
    parser.add_argument("--cycles", default="5", help="sleeps and wakes of each row (default %(default)s)")
    parser.add_argument("--kv-gib", default="", metavar="GIB", help="the KV cache (default 8, on CPU 1/16)")
    parser.add_argument("--step-s", default="", metavar="SECONDS", help="a step's, to print the switch's share of it")
    parser.add_argument("--run", default="", metavar="RUN_DIR", help="instead, a run whose median step is taken")
    return parser


def _launch(
    arguments: list[str],
    parser: Callable[[], argparse.ArgumentParser],
    command: Callable[[list[str], int], list[str]],
) -> None:
    if {"-h", "--help"} & set(arguments):
        parser().print_help()
        return
    become_torchrun(command(arguments, count_gpus()))


def _command(module: str, arguments: list[str], num_ranks: int | None, num_gpus: int) -> list[str]:
    check_ranks(num_ranks or 1, num_gpus)
    return torchrun(module, arguments, num_ranks or 1)


def _model_parser(name: str) -> argparse.ArgumentParser:
    usual = PolicyConfig()
    parser = Parser(prog=f"colo bench {name}", description=BENCHMARKS[name][1])
    parser.add_argument("--model", default="", metavar="FOLDER", help="a model in the Hugging Face layout")
    parser.add_argument("--shape", default="", help=f"instead, random weights: {', '.join(SHAPES)}")
    parser.add_argument("--policy-dtype", default=usual.dtype, help="float32 or bfloat16 (default %(default)s)")
    parser.add_argument("--dtype", default=usual.compute_dtype, help="the engine's (default %(default)s)")
    parser.add_argument("--ranks", default="", help="processes on this host, which share the policy (default 1)")
    parser.add_argument("--json", default="", metavar="FILE", help="write every number there too")
    return parser


def _model_options(given: argparse.Namespace) -> dict[str, Any]:
    """The fields of ModelOptions, by name."""
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
    return {
        "model": given.model,
        "shape": given.shape,
        "policy_dtype": given.policy_dtype,
        "dtype": given.dtype,
        "num_ranks": whole_number("--ranks", given.ranks) if given.ranks else None,
        "json_file": Path(given.json) if given.json else None,
    }


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} must be one of {', '.join(choices)}, got {value!r}")


def _number(option: str, text: str, *, may_be_0: bool = False) -> float:
    limit = "a number of at least 0" if may_be_0 else "a number above 0"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf or (may_be_0 and value == 0)):
        raise ValueError(f"{option} must be {limit}, got {text!r}")
    return value


def _median_step_s(run_dir: str) -> float:
    """Of a run's steps from the second on: the first compiles and loads what the others find."""
    lines = (Path(run_dir) / "metrics.jsonl").read_text().split("\n")[:-1]  # what follows the last newline was torn
    seconds = [row["time_s/step"] for row in map(json.loads, lines) if "time_s/step" in row][1:]
    if not seconds:
        raise ValueError(f"--run must be a run of at least two steps, got {run_dir!r}")
    return statistics.median(seconds)


BENCHMARKS: Commands = {
    "reload": (launch_reload, "write a policy's weights into an engine, by each way that there is"),
    "switch": (launch_switch, "let an engine sleep and take a policy's weights again, part by part, at each depth"),
}
