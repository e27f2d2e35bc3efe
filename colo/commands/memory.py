"""colo memory: who held how much memory in a step of a run, as a table."""

import argparse
import sys
from pathlib import Path

from colo.commands.arguments import Parser
from colo.engine.memory_table import PREFIX, readings_in, table


def memory_command(arguments: list[str]) -> None:
    """Print the table of rank 0's readings; with --help, the options.

    Raises:
        ValueError: an option is wrong, or the run has no such numbers.
    """
    parser = _parser()
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        return
    given = parser.parse_args(arguments)
    step, found = memory_table(Path(given.run_dir), given.step)
    sys.stdout.write(f"step {step}, rank 0\n{found}\n")


def memory_table(run_dir: Path, asked: str | None) -> tuple[int, str]:
    """The step and its table.

    Args:
        run_dir: With the run's metrics.jsonl.
        asked: The step, as it was typed; None is the last that has such numbers.

    Raises:
        ValueError: there are none; the message names the steps that have them.
    """
    from colo.metrics import read_metrics  # noqa: PLC0415 - it imports torch, which the other commands do without

    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"RUN_DIR must be a folder that holds the metrics.jsonl of its run, got {str(run_dir)!r}")
    rows = {row["step"]: readings_in(row) for row in read_metrics(path)}
    steps = [step for step, readings in rows.items() if readings]
    if not steps:
        raise ValueError(f"RUN_DIR must hold a run whose metrics have {PREFIX}/..., got none in {str(path)!r}")
    step = steps[-1] if asked is None else int(asked) if asked.isdecimal() else -1
    if step not in steps:
        raise ValueError(f"--step must be one with {PREFIX}/... ({steps[0]} to {steps[-1]}), got {asked!r}")
    return step, table(rows[step])


def _parser() -> argparse.ArgumentParser:
    description = "Print who held how much memory at each phase of a step, in GiB: the parts sum to the total."
    parser = Parser("colo memory", description)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("--step", metavar="N", help="of which step (default: the last)")
    return parser
