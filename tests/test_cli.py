"""The command line: what it launches, and what it refuses before it does."""

import subprocess
import sys
from pathlib import Path

import pytest

from colo.cli import COMMANDS
from colo.commands.launch import torchrun_command
from colo.recipe import load_config

ROOT = Path(__file__).resolve().parent.parent
DEBUG = ["--config-name", "debug"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def _colo(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "colo.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_train_becomes_torchrun_on_one_rank_per_gpu_or_on_two_without_one() -> None:
    end = ["-m", "colo.train", *DEBUG, "seed=1"]
    assert torchrun_command("colo.train", [*DEBUG, "seed=1"], 0) == [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=2",
        *end,
    ]
    assert torchrun_command("colo.train", [*DEBUG, "seed=1"], 4) == [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node=4",
        *end,
    ]
    assert torchrun_command("colo.train", ["--ranks=1", *DEBUG, "seed=1"], 4)[4] == "--nproc-per-node=1"


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^--ranks must be at most the number of GPUs 1, got 2$"):
        torchrun_command("colo.train", ["--ranks", "2", *DEBUG], 1)
    assert torchrun_command("colo.train", ["--ranks", "4", *DEBUG], 0)[4] == "--nproc-per-node=4"


@pytest.mark.parametrize("ranks", ["0", "-1", "two", "1.5"])
def test_a_number_of_ranks_is_a_whole_number(ranks: str) -> None:
    with pytest.raises(ValueError, match=rf"^--ranks must be a whole number of at least 1, got '{ranks}'$"):
        torchrun_command("colo.train", [f"--ranks={ranks}", *DEBUG], 0)


def test_a_recipe_is_checked_against_the_ranks_of_all_nodes() -> None:
    nodes = ["--nnodes", "2", "--node_rank=1", "--rdzv-endpoint", "a:1"]
    command = torchrun_command("colo.train", [*nodes, "--ranks", "4", *DEBUG], 0)
    assert command[3:7] == ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=a:1", "--nproc-per-node=4"]
    with pytest.raises(ValueError, match=r"^rollout\.num_prompts must be a multiple of the 6 engine replicas"):
        torchrun_command("colo.train", ["--nnodes=2", "--ranks=3", *DEBUG], 0)


@pytest.mark.parametrize("command", ["train", "eval", "show"])
def test_a_refused_recipe_is_one_message_without_a_traceback_and_status_2(command: str) -> None:
    ran = _colo(command, *DEBUG, "rollout.grup_size=4")
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr == "colo: rollout.grup_size is not an option (did you mean rollout.group_size?), got 4\n"


def test_show_prints_a_recipe_that_loads_to_the_same_config(tmp_path: Path) -> None:
    ran = _colo("show", *DEBUG, "seed=7", "--cfg", "job", "--resolve")
    assert (ran.returncode, ran.stderr) == (0, "")
    (tmp_path / "shown.yaml").write_text(ran.stdout)
    assert load_config([f"--config-name={tmp_path}/shown.yaml"]) == load_config([*DEBUG, "seed=7"])


def test_colo_alone_and_help_list_the_commands() -> None:
    alone, help_ = _colo(), _colo("train", "--help")
    assert alone.stdout == help_.stdout
    assert (alone.returncode, help_.returncode) == (0, 0)
    for word in (*COMMANDS, "--ranks", "debug"):
        assert word in alone.stdout
    unknown = _colo("trian")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == f"colo: the command must be one of {', '.join(COMMANDS)}, got 'trian'\n"
