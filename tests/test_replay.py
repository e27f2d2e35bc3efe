"""A saved rollout is trained on again without an engine, and gives the run's numbers bit for bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colo.checkpoint import list_checkpoints
from colo.commands.replay import read_replay_options, replay_torchrun, replayable_steps
from colo.ranks import Ranks
from colo.resume import rollout_path
from colo.rl.rollout_files import group_rows, groups_of, read_rollout, save_rollout
from colo.types import Completion, Group, Prompt, WeightVersionSpan
from tests.launch import ENVIRONMENT, FAST, ROOT, TIMED, read_rows, train
from tests.ranks import run_ranks


def _replay(run_dir: Path, step: int, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What `colo replay` prints, on a machine where vLLM cannot be imported."""
    blocked = tmp_path / "blocked" / "vllm"
    blocked.mkdir(parents=True, exist_ok=True)
    (blocked / "__init__.py").write_text("raise AssertionError('a replay must not import vllm')\n")
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(blocked.parent), str(ROOT)])}
    words = [sys.executable, "-m", "colo.cli", "replay", str(run_dir), "--step", str(step), *arguments]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return {name: value for name, value in json.loads(line).items() if not name.startswith(TIMED)}


def _is_part_of(replayed: dict[str, Any], row: dict[str, Any]) -> bool:
    return {"loss", "grad_norm", "gap/mean_abs", "reward/mean"} <= replayed.keys() and replayed.items() <= row.items()


def test_a_replay_gives_the_numbers_of_the_run_and_changes_nothing(tmp_path: Path, whole_run: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(whole_run, moved)
    before = sorted((path, path.stat().st_mtime_ns) for path in moved.rglob("*"))
    rows = read_rows(moved)
    for step in (0, 4):
        assert _is_part_of(_replay(moved, step, tmp_path), rows[step])
    assert sorted((path, path.stat().st_mtime_ns) for path in moved.rglob("*")) == before
    alone = _replay(moved, 4, tmp_path, "--ranks=1")
    assert alone["loss"] == pytest.approx(rows[4]["loss"], rel=1e-4, abs=1e-6)
    assert alone["reward/mean"] == rows[4]["reward/mean"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["schedule=one_off", "update.num_minibatches=2", "loss.kl_coef=0.1"],
        ["rollout.carry_over=true", "engine.tensor_parallel_size=2"],
    ],
    ids=["one_off", "carry_over"],
)
def test_a_replay_gives_the_numbers_of_a_run_with_old_tokens(tmp_path: Path, more: list[str]) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, *FAST, "num_steps=5", "rollout.save=2", "keep_checkpoints=1", *more)
    assert replayable_steps(run_dir) == [0, 2, 4]
    assert [path.name for path in list_checkpoints(run_dir)] == ["step-2", "step-4", "step-5"]
    rows = read_rows(run_dir)
    for step in (2, 4):
        assert _is_part_of(_replay(run_dir, step, tmp_path), rows[step])


def test_a_step_that_cannot_be_replayed_is_refused_and_those_that_can_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "rollouts").mkdir()
    for step in (0, 2, 4, 10):
        rollout_path(tmp_path, step).write_text("")
    for step in (2, 6, 10):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert replayable_steps(tmp_path) == [0, 2, 10]
    limit = "--step must be one with a rollout and its checkpoint (0, 2, 10), got "
    for step in ("4", "6", "-1", "x"):
        with pytest.raises(ValueError, match="--step must be") as raised:
            read_replay_options([str(tmp_path), f"--step={step}"])
        assert str(raised.value) == f"{limit}{step!r}"
    with pytest.raises(ValueError, match=r"^--ranks must be a whole number of at least 1, got '0'$"):
        read_replay_options([str(tmp_path), "--step=2", "--ranks=0"])
    with pytest.raises(ValueError, match=r"^RUN_DIR must be a folder that holds the config.yaml of its run, got "):
        read_replay_options([str(tmp_path / "none"), "--step=2"])
    assert replay_torchrun([str(tmp_path), "--step=2"], 0)[4:7] == [
        "--nproc-per-node=2",
        "-m",
        "colo.commands.replay_step",
    ]
    with pytest.raises(ValueError, match=r"^--ranks must be at most the number of GPUs 1, got 2$"):
        replay_torchrun([str(tmp_path), "--step=2", "--ranks=2"], 1)


def _groups() -> list[Group]:
    groups = []
    for slot in range(4):
        prompt = Prompt(
            row=slot + 7, token_ids=[1, slot], text=f"é\n\u2028{slot}", fields={"answer": [slot, None], "x": "\ud800"}
        )
        completions = [
            Completion(
                slot=slot,
                sample=sample,
                token_ids=[5, 6, 7],
                logprobs=[-0.1 - 0.2, -1e-30 / 3, -float(2**0.5)],
                finish_reason="length",
                spans=[WeightVersionSpan(version="1", start=0, end=2), WeightVersionSpan(version="2", start=2, end=3)],
                num_cached_tokens=slot,
            )
            for sample in range(2)
        ]
        groups.append(
            Group(slot=slot, prompt=prompt, completions=completions, rewards=[0.1 + 0.2, 1 / 3], texts=["a\nb", "\x85"])
        )
    return groups


def _save(ranks: Ranks, run_dir: Path) -> None:
    save_rollout(run_dir, 3, _groups()[ranks.replica :: ranks.num_replicas], ranks)


def test_a_rollout_comes_back_from_disk_exactly(tmp_path: Path) -> None:
    run_ranks(_save, tmp_path)
    path = rollout_path(tmp_path, 3)
    assert read_rollout(path) == _groups()
    assert (
        groups_of([row for group in _groups() for row in group_rows(group)], lambda row: _groups()[row["slot"]].prompt)
        == _groups()
    )
    lines = path.read_bytes().split(b"\n")
    assert len(lines) == 9
    path.write_bytes(b"\n".join([lines[0], b'{"slot": 1}']))
    with pytest.raises(ValueError, match="must hold one completion a line, got line 2: KeyError"):
        read_rollout(path)
