"""The whole loop as a user starts it: real processes, the real vLLM, real files."""

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.launch import ENVIRONMENT, FAST, ROOT, WHOLE, Launch, free_port, numbers, read_rows, train


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
        arguments = [f"model={folder}", "eval_prompts=colo.rl.tasks.letters"]
        launch = Launch(debug_run, *arguments, program=("colo.cli", "eval"))
        assert launch.wait() == 0, launch.output
        (line,) = [line for line in launch.output.splitlines() if line.startswith("{")]
        scores[name] = json.loads(line)["eval/reward"]
    assert scores["end"] > scores["start"] + 0.3


def test_two_agents_of_one_rank_each_give_the_numbers_of_one_agent_of_two(tmp_path: Path, whole_run: Path) -> None:
    nodes = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=loopback"]
    agents = [Launch(tmp_path / "run", *nodes, "--ranks=1", *WHOLE) for _ in range(2)]
    for agent in agents:
        assert agent.wait() == 0, agent.output
    assert numbers(tmp_path / "run") == numbers(whole_run)
    for name in ("model.safetensors", "optimizer/optimizer.safetensors"):
        checkpoint = f"checkpoints/step-8/{name}"
        assert (tmp_path / "run" / checkpoint).read_bytes() == (whole_run / checkpoint).read_bytes()


@pytest.mark.parametrize(
    "depth", ["auto", *(pytest.param(depth, marks=pytest.mark.slow) for depth in ("none", "kv", "1"))]
)
def test_numbers_do_not_depend_on_how_deep_the_engine_sleeps(tmp_path: Path, whole_run: Path, depth: str) -> None:
    train(tmp_path / "run", *WHOLE, f"engine.sleep={depth}")
    assert 'sleep: "2"' in (whole_run / "config.yaml").read_text().replace("'", '"')
    assert numbers(tmp_path / "run") == numbers(whole_run)


@pytest.mark.slow
def test_truncated_rollouts_are_scored_over_the_kept_set_at_every_step(tmp_path: Path) -> None:
    train(tmp_path / "run", "num_steps=6", "rollout.logprobs=processed", "rollout.top_p=0.9")
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(6))
    for row in rows:
        assert row["gap/mean_abs"] <= 1e-5
        assert 0 <= row["gap/outside_kept"] <= 0.001 * row["tokens/trained"], "but for rounding at the edge"
        assert 0 < row["grad_norm"] < math.inf
    # Of 258 nearly equal tokens 0.9 of the mass is 232.
    assert rows[0]["entropy/mean"] < math.log(240)


def test_evaluation_comes_before_the_first_step_every_so_often_and_at_the_end_and_changes_nothing(
    tmp_path: Path, whole_run: Path
) -> None:
    train(tmp_path / "run", *FAST, "num_steps=3", "eval_prompts=colo.rl.tasks.letters", "eval_every=2")
    rows = numbers(tmp_path / "run")
    assert [(row["step"], "eval/reward" in row) for row in rows] == [(0, True), (1, False), (2, True), (3, True)]
    scores = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert all(0 <= score <= 1 for score in scores)
    assert len(set(scores)) > 1, "the policy moved between them"
    trained = [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in rows]
    assert trained == [*numbers(whole_run)[:3], {"step": 3}]


def test_a_reward_that_times_out_is_recorded_and_the_run_goes_on_while_others_say_whom_they_wait_for(
    tmp_path: Path,
) -> None:
    launch = train(
        tmp_path / "run",
        *FAST,
        "num_steps=2",
        "prompts=tests.reward_functions.one_prompt_of_four_is_slow",
        "reward=tests.reward_functions.slow_where_told",
        "scoring.timeout_s=1.5",
        "scoring.timeout_reward=-1",
        "ranks.notice_s=1",
    )
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["reward/num_timeouts"] == 2.0
        assert row["reward/mean"] == (6 * 1.0 + 2 * -1.0) / 8
        assert row["time_s/score"] < 60, "ended at the limit, not when the function returned"
    assert launch.output.count("slow_where_told took longer than scoring.timeout_s 1.5") == 4
    for step in range(2):
        waits = re.findall(rf"rank (\d): step {step}: scoring: waiting for rank (\d) in step ", launch.output)
        assert set(waits) in ({("0", "1")}, {("1", "0")}), launch.output


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
        ("engine.sleep=deep", "engine.sleep must be one of none, kv, 1, 2, auto, got 'deep'"),
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
