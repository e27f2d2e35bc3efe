"""colo check: whether what a run says of itself can be trusted."""

import os
import subprocess
import sys
import tempfile

from colo.commands.arguments import Commands, run_named
from colo.commands.check_logprobs import logprobs_check
from colo.commands.launch import count_gpus, torchrun_command

RUN = "colo.commands.check_run"
USUAL_STEPS = 6
MIN_STEPS = 4
"""Of which two halves of the gap can be compared."""


def check_command(arguments: list[str]) -> None:
    """Run a check, and end with its exit status: 1 where a line of its table failed. List them where none is named.

    Raises:
        ValueError: no such check, or an option of it is wrong.
    """
    run_named("check", "check", CHECKS, arguments)


def run_check(arguments: list[str]) -> None:
    """colo check run [--steps N] --config-name RECIPE [overrides]: in a folder of its own, which it removes.

    Raises:
        ValueError: the recipe, an override, the number of ranks or of steps is wrong.
    """
    if {"-h", "--help"} & set(arguments):
        sys.stdout.write("usage: colo check run [--steps N] [--ranks N] --config-name RECIPE [option=value ...]\n")
        return
    num_steps, rest = _take_steps(arguments)
    with tempfile.TemporaryDirectory(prefix="colo-check-") as folder:
        own = [f"run_dir={folder}/run", "resume=never", "eval_every=0", "rollout.save=0", "tracking.tensorboard=false"]
        command = torchrun_command(RUN, [*rest, *own], count_gpus())
        place = command.index(RUN) + 1
        environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        if "--nproc-per-node=1" not in command:
            environment = {"OMP_NUM_THREADS": "1"} | environment
        done = subprocess.run([*command[:place], str(num_steps), *command[place:]], env=environment, check=False)
    sys.exit(done.returncode)


def _take_steps(arguments: list[str]) -> tuple[int, list[str]]:
    rest, text = [], str(USUAL_STEPS)
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == "--steps":
            text = value if equals else next(words, "")
        else:
            rest.append(word)
    if not text.isdecimal() or int(text) < MIN_STEPS:
        raise ValueError(f"--steps must be a whole number of at least {MIN_STEPS}, got {text!r}")
    return int(text), rest


CHECKS: Commands = {
    "run": (run_check, "a recipe's own loop: without learning nothing may change, with it both sides must"),
    "logprobs": (logprobs_check, "a model's engine beside a float32 reference: what raw and processed logprobs are of"),
}
