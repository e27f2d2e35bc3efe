"""colo train and colo eval: check a recipe, then become torchrun."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from colo.commands.arguments import whole_number
from colo.config import check_config
from colo.recipe import load_config
from colo.resume import refuse_changed_options, refuse_other_tiny_model

TRAIN, EVALUATE = "colo.train", "colo.evaluate"
PASSED_ON = (
    "nnodes",
    "node-rank",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-backend",
    "rdzv-conf",
    "master-addr",
    "master-port",
)
"""torchrun's own options."""
RANKS_WITHOUT_GPU = 2
SHUTDOWN_TIMEOUT_S = 600
"""How long torchrun waits, after SIGTERM, for the ranks to finish their step and save; its own default is 30."""


def train_command(arguments: list[str]) -> None:
    """Launch colo.train; does not return.

    Raises:
        ValueError: the recipe, an override, or the number of ranks is wrong, or the run in run_dir has other options.
    """
    _launch(TRAIN, arguments)


def eval_command(arguments: list[str]) -> None:
    """Launch colo.evaluate; does not return.

    Raises:
        ValueError: as for train_command.
    """
    _launch(EVALUATE, arguments)


def _launch(module: str, arguments: list[str]) -> None:
    command = torchrun_command(module, arguments, count_gpus())
    compare = refuse_changed_options if module == TRAIN else refuse_other_tiny_model
    compare(load_config(_split(arguments)[1]))
    # Not --shutdown-timeout: torch before 2.12 knows neither, and would stop at the flag.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_TIMEOUT_S))
    become_torchrun(command)


def become_torchrun(command: list[str]) -> None:
    """Run a torchrun command line in the place of this process; does not return."""
    if "--nproc-per-node=1" not in command:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it for several ranks, with a banner
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its warnings speak of torch's own set-up, once a rank
    sys.stdout.flush()
    os.execv(command[0], command)


def torchrun_command(module: str, arguments: list[str], num_gpus: int) -> list[str]:
    """The command line that launches `module` on this host, for a recipe that was checked.

    Args:
        arguments: `--ranks N`, torchrun's PASSED_ON options, and what `load_config` takes.
        num_gpus: Of this host.

    Raises:
        ValueError: the recipe, an override, or the number of ranks is wrong.
    """
    options, rest = _split(arguments)
    ranks = whole_number("--ranks", options.pop("ranks", str(num_gpus or RANKS_WITHOUT_GPU)))
    check_ranks(ranks, num_gpus)
    num_nodes = whole_number("--nnodes", options.get("nnodes", "1"))
    check_config(load_config(rest), ranks * num_nodes, is_training=module == TRAIN)
    nodes = [f"--{name}={value}" for name, value in options.items()] or ["--standalone"]
    return torchrun(module, rest, ranks, nodes)


def check_ranks(ranks: int, num_gpus: int) -> None:
    """Refuse more ranks than this host has GPUs; without any, they share its cores.

    Raises:
        ValueError: as said.
    """
    if num_gpus and ranks > num_gpus:
        raise ValueError(f"--ranks must be at most the number of GPUs {num_gpus}, got {ranks}")


def torchrun(module: str, arguments: list[str], ranks: int, nodes: Sequence[str] = ("--standalone",)) -> list[str]:
    """The command line of torchrun for a module; `nodes` are torchrun's own options."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *nodes,
        f"--nproc-per-node={ranks}",
        "-m",
        module,
        *arguments,
    ]


def count_gpus() -> int:
    """GPUs that torch sees on this host; asked in a process of its own, since torch takes seconds to import."""
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        return 0
    code = "import sys, torch; sys.stdout.write(str(torch.cuda.device_count()))"
    return int(subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout)


def _split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    rest = []
    words = iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if flag.startswith("--") and name in ("ranks", *PASSED_ON):
            options[name] = value if equals else next(words, "")
            if not options[name]:
                raise ValueError(f"--{name} must be followed by a value, got nothing")
        else:
            rest.append(word)
    return options, rest
