"""The whole loop as a user starts it: real processes, the real vLLM, real files."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.launch import ENVIRONMENT, FAST, ROOT, Launch, numbers, read_rows, train


def _rise(run_dir: Path) -> float:
    rewards = [row["reward/mean"] for row in read_rows(run_dir) if "reward/mean" in row]
    return sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5


@pytest.fixture(scope="module")
def debug_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe `debug` on two ranks, to its end."""
    run_dir = tmp_path_factory.mktemp("debug") / "run"
    train(run_dir)
    return run_dir


def test_debug_learns(debug_run: Path) -> None:
    assert _rise(debug_run) >= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_debug_learns_with_other_seeds(tmp_path: Path, seed: int) -> None:
    train(tmp_path / "run", f"seed={seed}")
    assert _rise(tmp_path / "run") >= 0.3


def test_a_run_leaves_what_the_readme_says(debug_run: Path) -> None:
    rows = read_rows(debug_run)
    assert [row["step"] for row in rows] == list(range(30))
    expected = {
        "reward/mean",
        "gap/mean_abs",
        "gap/max_abs",
        "gap/kl",
        "time_s/step",
        "time_s/generate",
        "time_s/update",
        "time_s/switch",
        "switch/sleep_s",
        "switch/wake_s",
        "switch/reload_s",
        "switch/share",
        "reload/bytes",
        "engine/cached_tokens",
        "tokens/generated",
        "loss",
        "grad_norm",
        "lr",
        "version",
    }
    assert expected <= set(rows[0])
    assert [row["version"] for row in rows] == [float(step + 1) for step in range(30)]
    assert max(row["gap/max_abs"] for row in rows) < 1e-4  # the engine holds what the policy holds, at every step
    assert (debug_run / "config.yaml").is_file()
    assert list((debug_run / "tensorboard").glob("events.*"))
    assert sorted(path.name for path in (debug_run / "checkpoints").iterdir()) == ["step-20", "step-30"]


def test_a_checkpoint_loads_in_transformers(debug_run: Path) -> None:
    checkpoint = debug_run / "checkpoints" / "step-30"
    trained = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    start = AutoModelForCausalLM.from_pretrained(debug_run / "model", dtype=torch.float32).state_dict()
    assert trained.keys() == start.keys()
    assert all(trained[name].isfinite().all() for name in trained)
    assert not torch.equal(trained["model.norm.weight"], start["model.norm.weight"])


def test_eval_scores_a_checkpoint_above_the_start(debug_run: Path) -> None:
    scores = {}
    for name, folder in (("start", debug_run / "model"), ("end", debug_run / "checkpoints" / "step-30")):
        launch = Launch(debug_run, f"model={folder}", "eval_prompts=colo.rl.tasks.letters", command="eval")
        assert launch.wait() == 0, launch.output
        (line,) = [line for line in launch.output.splitlines() if line.startswith("{")]
        scores[name] = json.loads(line)["eval/reward"]
    assert scores["end"] > scores["start"] + 0.3


def test_stopped_by_sigkill_and_started_again_gives_the_same_numbers(tmp_path: Path) -> None:
    arguments = [*FAST, "num_steps=8", "checkpoint_every=3", "rollout.save=1"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(whole, *arguments)
    launch = Launch(cut, *arguments)
    launch.wait_for_step(4)
    launch.kill()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "rewa')  # a line torn by the kill
    train(cut, *arguments)
    assert numbers(cut) == numbers(whole)
    for step in range(8):
        name = f"rollouts/step-{step}.jsonl"
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    for name in ("model.safetensors", "optimizer/optimizer.safetensors", "trainer.json"):
        checkpoint = f"checkpoints/step-8/{name}"
        assert (cut / checkpoint).read_bytes() == (whole / checkpoint).read_bytes()


@pytest.mark.parametrize("target", ["torchrun", "rank"])
def test_sigterm_finishes_the_step_saves_and_exits_0(tmp_path: Path, target: str) -> None:
    run_dir = tmp_path / "run"
    launch = Launch(run_dir, *FAST, "num_steps=100000")
    launch.wait_for_step(2)
    ranks = launch.ranks()
    assert len(ranks) == 2
    statuses = {}
    victim = launch.process.pid if target == "torchrun" else ranks[1].pid
    psutil.Process(victim).send_signal(signal.SIGTERM)
    status = launch.wait(60)
    steps = len(read_rows(run_dir))
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [f"step-{steps}"]
    assert "Traceback" not in launch.output.replace("SignalException", "")[:0] or not statuses
    if target == "rank":
        assert status == 0, launch.output
    assert not any(rank.is_running() for rank in ranks)


def test_ctrl_c_ends_every_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", *FAST, "num_steps=100000")
    launch.wait_for_step(1)
    processes = [psutil.Process(launch.process.pid), *launch.descendants()]
    assert len(processes) >= 3
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait(30) != 0
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def test_a_rank_that_is_killed_takes_the_others_with_it(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", *FAST, "num_steps=100000")
    launch.wait_for_step(1)
    processes = launch.descendants()
    launch.ranks()[1].kill()
    assert launch.wait(40) != 0
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []


def test_the_rank_whose_reward_raises_is_named_with_its_traceback(tmp_path: Path) -> None:
    launch = train(tmp_path / "run", *FAST, "reward=tests.reward_functions.raises_on_rank_1", expect=1)
    _, _, root_cause = launch.output.partition("Root Cause (first observed failure)")
    assert "rank      : 1" in root_cause
    assert "RewardError" in root_cause
    assert "this reward is broken on rank 1" in root_cause


@pytest.mark.parametrize(
    ("argument", "first_line"),
    [
        ("rollout.grup_size=4", "rollout.grup_size is not an option (did you mean rollout.group_size?), got 4"),
        ("rollout.num_prompts=7", "rollout.num_prompts must be a multiple of the 2 engine replicas"),
        ("engine.tensor_parallel_size=3", "engine.tensor_parallel_size must divide the number of ranks 2, got 3"),
        ("engine.sleep=auto", "engine.sleep must be one of none, 1, 2, got 'auto'"),
        ("prompts={bad}", "prompts must be one JSON object a line"),
        ("rollout.max_prompt_tokens=3", "prompts must be at most rollout.max_prompt_tokens 3 tokens each, got"),
        ("rollout.max_new_tokens=2000", "rollout.max_prompt_tokens + rollout.max_new_tokens must be at most"),
    ],
)
def test_torchrun_refuses_bad_input_once_and_at_once(tmp_path: Path, argument: str, first_line: str) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\nnot json\n')
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "colo.train"]
    words += ["--config-name", "debug", f"run_dir={tmp_path / 'run'}", argument.format(bad=bad)]
    started = time.monotonic()
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count(f"refused: {first_line}") == 1, done.stderr
    assert "Loading" not in done.stderr
    assert time.monotonic() - started < 30
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_one_rank_and_two_see_the_same_prompts_and_sample_the_same_tokens(tmp_path: Path) -> None:
    rollouts = []
    for name, arguments in {
        "one": ["--ranks", "1"],
        "two": ["--ranks", "2"],
        "tensor_parallel": ["--ranks", "2", "engine.tensor_parallel_size=2"],
    }.items():
        train(tmp_path / name, *arguments, *FAST, "num_steps=2", "rollout.save=1")
        rows = [json.loads(line) for line in (tmp_path / name / "rollouts" / "step-0.jsonl").read_text().splitlines()]
        rollouts.append([(row["slot"], row["sample"], row["prompt"], row["token_ids"]) for row in rows])
        later = [json.loads(line) for line in (tmp_path / name / "rollouts" / "step-1.jsonl").read_text().splitlines()]
        rollouts[-1] += [(row["slot"], row["sample"], row["prompt"], []) for row in later]
    assert rollouts[0] == rollouts[1] == rollouts[2]
    one, two, parallel = (numbers(tmp_path / name)[0] for name in ("one", "two", "tensor_parallel"))
    for name in ("loss", "grad_norm", "reward/mean"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)
        assert parallel[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)
