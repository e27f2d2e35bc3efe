"""The console script `colo`: `colo COMMAND --config-name RECIPE [overrides]`."""

import sys
from collections.abc import Callable

from colo.commands.bench import bench_command
from colo.commands.check import check_command
from colo.commands.doctor import doctor_command
from colo.commands.launch import eval_command, train_command
from colo.commands.memory import memory_command
from colo.commands.plan import plan_command
from colo.commands.replay import replay_command
from colo.commands.show import show_command
from colo.recipe import recipe_names

COMMANDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "train": (train_command, "train a policy: checks the recipe, then becomes torchrun"),
    "eval": (eval_command, "score a model or a checkpoint on held-out prompts, the same way"),
    "show": (show_command, "print every option of a recipe with its value"),
    "replay": (
        replay_command,
        "train again on a rollout that a run saved, without an engine: colo replay RUN_DIR --step N",
    ),
    "plan": (
        plan_command,
        "what memory a recipe will take on each rank and whether it fits, without a GPU; with --help",
    ),
    "memory": (memory_command, "who held how much memory at each phase of a step: colo memory RUN_DIR [--step N]"),
    "doctor": (doctor_command, "before a long job: what on this host would make it fail, and what to do; with --help"),
    "check": (check_command, "whether what a run says of itself can be trusted; alone it lists the checks"),
    "bench": (bench_command, "measure a part of a step; alone it lists which"),
}
USAGE = """\
usage: colo COMMAND --config-name RECIPE [option=value ...]

commands:
{commands}

launching (train, eval):
  --ranks N           processes on this host (default: its GPUs; 2 where there is none)
  --nnodes, --node-rank, --rdzv-endpoint, --rdzv-id, --rdzv-backend, --master-addr, --master-port
                      passed to torchrun; without --nnodes the run stays on this host

recipes: {recipes}
options: colo/config.py documents each; colo show prints them
"""


def main() -> int:
    """Run one command; a refused recipe is one message on stderr and exit status 2."""
    arguments = sys.argv[1:]
    asks_help = any(argument in ("-h", "--help") for argument in arguments)
    if not arguments or (
        asks_help and arguments[0] not in ("bench", "check", "doctor", "memory", "plan", "replay")
    ):  # these have options of their own
        commands = "\n".join(f"  {name:<8}{text}" for name, (_, text) in COMMANDS.items())
        sys.stdout.write(USAGE.format(commands=commands, recipes=", ".join(recipe_names())))
        return 0
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise ValueError(f"the command must be one of {', '.join(COMMANDS)}, got {name!r}")
        COMMANDS[name][0](rest)
    except ValueError as error:
        sys.stderr.write(f"colo: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
