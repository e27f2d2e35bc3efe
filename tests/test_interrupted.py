"""Runs that somebody or something ends: by SIGTERM, SIGKILL, Ctrl-C, a dead rank or a full disk."""

import json
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from colo.checkpoint import find_damage, list_checkpoints
from tests.launch import ENDLESS, FAST, WHOLE, Launch, launch_ranks, numbers, read_rows, train
from tests.models import stops_often

KIB = 1024
SEVERAL = ["update.num_minibatches=2", "update.num_epochs=2", "loss.kl_coef=0.1"]
"""Four optimizer steps a rollout, and a reference beside the policy."""
ONE_OFF = ["schedule=one_off"]
CARRY_OVER = ["rollout.carry_over=true", "rollout.max_new_tokens=40", "engine.vllm.max_model_len=96"]
"""Rollouts that a kill finds sampled, wholly or in part, and not trained on."""
MANY = [*FAST, "num_steps=24", "checkpoint_every=1"]
"""A run in which a kill often falls into a save."""


@pytest.fixture(scope="module")
def many_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MANY, never interrupted."""
    run_dir = tmp_path_factory.mktemp("many") / "run"
    train(run_dir, *MANY)
    return run_dir


def _assert_same_end(run_dir: Path, whole: Path, step: int) -> None:
    assert numbers(run_dir) == numbers(whole)
    for name in ("model.safetensors", "optimizer/optimizer.safetensors", "trainer.json"):
        checkpoint = f"checkpoints/step-{step}/{name}"
        assert (run_dir / checkpoint).read_bytes() == (whole / checkpoint).read_bytes()
    sampled = [run / f"checkpoints/step-{step}/sampled.json" for run in (run_dir, whole)]
    assert sampled[0].is_file() == sampled[1].is_file()
    assert not sampled[0].is_file() or sampled[0].read_bytes() == sampled[1].read_bytes()


def _all_gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


def _assert_saved_after_the_last_step(run_dir: Path) -> int:
    """The steps done: each has its line, and only the last one its checkpoint, which is whole."""
    rows = read_rows(run_dir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{len(rows)}"
    assert find_damage(checkpoint) is None
    assert json.loads((checkpoint / "trainer.json").read_text())["policy"]["num_updates"] == len(rows)
    return len(rows)


def _partial(run_dir: Path) -> list[Path]:
    return list((run_dir / "checkpoints").glob(".step-*.partial-*"))


def _is_held_in_a_save(launch: Launch) -> bool:
    """Whether rank 0 was stopped between the start of a save and its end; where it was too late, it goes on."""
    if not _partial(launch.run_dir):
        return False
    main = launch.ranks()[0]
    main.suspend()
    while main.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    if _partial(launch.run_dir):
        return True
    main.resume()
    return False


@pytest.mark.parametrize(
    "more",
    [[], *(pytest.param(more, marks=pytest.mark.slow) for more in (SEVERAL, ONE_OFF, CARRY_OVER))],
    ids=["one_update", "several", "one_off", "carry_over"],
)
def test_stopped_by_sigkill_and_started_again_gives_the_same_numbers(
    tmp_path: Path, whole_run: Path, tiny_models: dict[str, Path], more: list[str]
) -> None:
    arguments = [*WHOLE, *more]
    if more == CARRY_OVER:
        arguments.append(f"model={stops_often(tiny_models['qwen3'], tmp_path / 'model')}")
    whole, cut = whole_run, tmp_path / "cut"
    if more:
        whole = tmp_path / "whole"
        train(whole, *arguments)
        assert numbers(whole) != numbers(whole_run)
    launch = Launch(cut, *arguments)
    launch.wait_for_step(4)
    launch.kill()
    assert len(read_rows(cut)) < 8, "the kill came too late to cut anything"
    holds_sampled = [(folder / "sampled.json").is_file() for folder in list_checkpoints(cut)]
    assert holds_sampled == [more in (ONE_OFF, CARRY_OVER)] * len(holds_sampled)
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "rewa')  # a line torn by the kill
    train(cut, *arguments)
    for step in range(8):
        name = f"rollouts/step-{step}.jsonl"
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    _assert_same_end(cut, whole, 8)
    if more == CARRY_OVER:
        assert min(row["rollout/carried_tokens"] for row in read_rows(cut)[1:]) > 0, "each save found parts"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments_until_done_gives_the_same_numbers(tmp_path: Path, many_run: Path, seed: int) -> None:
    draw = random.Random(seed)
    run_dir = tmp_path / "run"
    in_a_save = Launch(run_dir, *MANY)
    after = f"step-{draw.randint(1, 8)}"
    in_a_save.wait_until((run_dir / "checkpoints" / after).exists, after)
    in_a_save.wait_until(lambda: _is_held_in_a_save(in_a_save), "save")
    in_a_save.kill()
    assert _partial(run_dir), "the kill fell into a save"
    for _ in range(2):
        done = len(read_rows(run_dir))
        launch = Launch(run_dir, *MANY)
        if draw.random() < 0.3:  # while it starts
            time.sleep(draw.uniform(0, 10))
        else:
            launch.wait_until(lambda seen=done: len(read_rows(run_dir)) != seen, "a step")
            time.sleep(draw.uniform(0, 2))
        launch.kill()
        for checkpoint in list_checkpoints(run_dir):
            assert find_damage(checkpoint) is None
    train(run_dir, *MANY)
    _assert_same_end(run_dir, many_run, 24)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-23", "step-24"]


@pytest.mark.parametrize("num_asked", [2, 1])
def test_sigterm_to_ranks_finishes_the_step_saves_and_each_exits_0(tmp_path: Path, num_asked: int) -> None:
    run_dir = tmp_path / "run"
    ranks = launch_ranks(run_dir, *ENDLESS)
    for rank in ranks:
        rank.wait_for_step(2)
    for rank in ranks[-num_asked:]:
        rank.process.send_signal(signal.SIGTERM)
    assert [rank.wait(60) for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
    num_steps = _assert_saved_after_the_last_step(run_dir)
    told = f"stopped by SIGTERM after {num_steps} steps, saved step-{num_steps}\n"
    assert [rank.output.count(told) for rank in ranks] == [1, 0]


@pytest.mark.parametrize("target", ["torchrun", "rank"])
def test_sigterm_under_torchrun_finishes_the_step_saves_and_leaves_no_process(tmp_path: Path, target: str) -> None:
    run_dir = tmp_path / "run"
    launch = Launch(run_dir, *ENDLESS)
    launch.wait_for_step(2)
    ranks, processes = launch.ranks(), launch.descendants()
    assert len(ranks) == 2
    (psutil.Process(launch.process.pid) if target == "torchrun" else ranks[1]).send_signal(signal.SIGTERM)
    status = launch.wait(60)
    num_steps = _assert_saved_after_the_last_step(run_dir)
    assert launch.output.count(f"stopped by SIGTERM after {num_steps} steps, saved") == 1
    assert "Root Cause" not in launch.output, "torchrun must find no rank that failed"
    if target == "rank":  # torchrun itself, once stopped, says so by its status
        assert status == 0, launch.output
    assert _all_gone(processes)


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", *ENDLESS)
    launch.wait_for_step(1)
    processes = [psutil.Process(launch.process.pid), *launch.descendants()]
    assert len(processes) >= 3
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait(30) != 0
    assert _all_gone(processes)


def test_a_rank_that_is_killed_takes_the_others_with_it(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", *ENDLESS)
    launch.wait_for_step(1)
    processes = launch.descendants()
    launch.ranks()[1].kill()
    assert launch.wait(40) != 0
    assert _all_gone(processes)


@pytest.mark.slow
def test_a_full_disk_during_a_save_is_an_error_that_names_the_rank_and_leaves_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    launch = Launch(run_dir, *ENDLESS, "checkpoint_every=1")
    launch.wait_for_step(2)
    # From now on rank 0 can write metrics.jsonl, but no model: past the limit a write fails as on a full disk.
    launch.ranks()[0].rlimit(psutil.RLIMIT_FSIZE, (200 * KIB, psutil.RLIM_INFINITY))
    assert launch.wait(60) == 1
    num_steps = len(read_rows(run_dir))
    _, _, root_cause = launch.output.partition("Root Cause (first observed failure)")
    assert "rank      : 0" in root_cause
    assert "File too large" in root_cause
    assert f"saving step {num_steps} failed on rank 0" in launch.output, "and so says the rank that could write"
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert left == sorted([f"step-{num_steps - 2}", f"step-{num_steps - 1}"])
    assert all(find_damage(checkpoint) is None for checkpoint in list_checkpoints(run_dir))

    train(run_dir, *FAST, f"num_steps={num_steps + 1}", "checkpoint_every=1")  # once there is room again
    assert [row["step"] for row in read_rows(run_dir)] == list(range(num_steps + 1))
