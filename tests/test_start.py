"""Before a run is built: what its model and its run_dir must be, and what goes on from an earlier start."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from colo.config import Config, ScoringConfig
from colo.engine.engine import Engine
from colo.policy.shard import stand_ins
from colo.ranks import Ranks
from colo.recipe import load_config
from colo.resume import refuse_changed_options, refuse_changed_prompts, refuse_other_tiny_model, save_options
from colo.rl.rewards import Rewards
from colo.rl.sampler import Scorer
from colo.start import check_model, model_folder, read_tokenizer
from colo.types import Completion, Group, Prompt
from tests.launch import ENVIRONMENT, ROOT, WHOLE, numbers, train
from tests.ranks import run_ranks

DEBUG = ["--config-name", "debug"]


def _config(run_dir: Path, *overrides: str) -> Config:
    return load_config([*DEBUG, f"run_dir={run_dir}", *overrides])


def _run(run_dir: Path, *overrides: str) -> Path:
    """A run_dir as a run with these options leaves it after its first step; returns its config.yaml."""
    run_dir.mkdir(exist_ok=True)
    save_options(_config(run_dir, *overrides), "digest of its prompts")
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n')
    return run_dir / "config.yaml"


def _refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=" must ") as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize(
    ("override", "option", "was", "now"),
    [
        ("seed=1", "seed", 0, 1),
        ("model=tiny:llama", "model", "tiny:qwen3", "tiny:llama"),
        ("algorithm=rloo", "algorithm", "grpo", "rloo"),
        ("loss.kl_coef=0.1", "loss.kl_coef", 0.0, 0.1),
        ("update.lr=1e-3", "update.lr", 3e-3, 1e-3),
        ("update.schedule=linear", "update.schedule", "constant", "linear"),
        ("rollout.num_prompts=4", "rollout.num_prompts", 8, 4),
        ("rollout.stop=[a]", "rollout.stop", [], ["a"]),
        ("policy.dtype=bfloat16", "policy.dtype", "float32", "bfloat16"),
        ("scoring.timeout_reward=1", "scoring.timeout_reward", 0.0, 1.0),
        ("reward={a.b: 1}", "reward", "colo.rl.tasks.letters_reward", {"a.b": 1}),
    ],
)
def test_an_option_that_is_not_the_runs_is_refused_by_name(
    tmp_path: Path, override: str, option: str, was: Any, now: Any
) -> None:
    path = _run(tmp_path / "run")
    told = _refusal(lambda: refuse_changed_options(_config(path.parent, override))).splitlines()
    assert told == [
        f"{option} must be {was!r} as in {path} (a resumed run keeps its options), got {now!r}",
        f"give another run_dir, or remove {path.parent}",
    ]
    refuse_changed_options(_config(path.parent, "resume=never", override))  # find_checkpoint refuses that, whatever
    refuse_changed_options(_config(tmp_path / "other", override))


def test_every_changed_option_is_told_and_a_checkpoint_alone_is_a_run_too(tmp_path: Path) -> None:
    path = _run(tmp_path, r"rollout.stop=['\${x}']", "reward={a.b: 1, c.d: 0.5}")
    (tmp_path / "metrics.jsonl").unlink()
    same = [r"rollout.stop=['\${x}']", "reward={a.b: 1.0, c.d: 0.5}"]
    refuse_changed_options(_config(tmp_path, "seed=1"))  # no step was done: nothing goes on, and nothing is lost
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    refuse_changed_options(_config(tmp_path, *same))
    told = _refusal(lambda: refuse_changed_options(_config(tmp_path, "seed=1", "loss.kl_coef=1", *same))).splitlines()
    assert told[0].startswith(f"seed must be 0 as in {path} (")
    assert told[1] == "and loss.kl_coef must be 0.0, got 1.0"
    path.unlink()
    without = _refusal(lambda: refuse_changed_options(_config(tmp_path, *same)))
    assert without == f"run_dir must hold the config.yaml of its run, got {str(tmp_path)!r} without it"


def test_options_that_leave_the_run_the_same_may_change(tmp_path: Path) -> None:
    path = _run(tmp_path)
    changed = [
        "num_steps=40",
        "eval_every=2",
        "eval_prompts=colo.rl.tasks.letters",
        "checkpoint_every=1",
        "keep_checkpoints=5",
        "resume=elsewhere",
        "tracking.tensorboard=false",
        "ranks.notice_s=1",
        "engine.tensor_parallel_size=2",
        "engine.sleep=1",
        "engine.vllm.max_num_seqs=3",
        "reload.transport=gather",
        "reload.proof=off",
        "reload.bucket_mib=1",
        "gap.stop=1",
        "gap.window=7",
        "batch.max_tokens=7",
        "policy.gradient_checkpointing=true",
        "policy.logprob_chunk_tokens=9",
        "scoring.timeout_s=1",
        "rollout.save=1",
    ]
    refuse_changed_options(_config(tmp_path, *changed))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "correction_high" not in line))
    refuse_changed_options(_config(tmp_path, "loss.correction_high=5"))  # an option that the run did not know


def test_num_steps_may_change_only_where_the_learning_rates_do_not_follow_from_it(tmp_path: Path) -> None:
    path = _run(tmp_path, "update.schedule=linear")
    refuse_changed_options(_config(tmp_path, "update.schedule=linear"))
    told = _refusal(lambda: refuse_changed_options(_config(tmp_path, "update.schedule=linear", "num_steps=40")))
    assert told == (f"num_steps must be 30 as in {path} (update.schedule=linear sets the learning rates by it), got 40")


def test_a_run_whose_prompts_have_changed_is_refused(tmp_path: Path) -> None:
    config = _config(tmp_path / "run")
    refuse_changed_prompts(config, "anything: there is no run yet")
    _run(tmp_path / "run")
    refuse_changed_prompts(config, "digest of its prompts")
    told = _refusal(lambda: refuse_changed_prompts(config, "of others"))
    assert told.startswith("prompts must hold the rows that the run in ")
    assert "got others from 'colo.rl.tasks.letters'" in told


def test_an_evaluation_takes_other_options_but_not_another_tiny_model(tmp_path: Path) -> None:
    path = _run(tmp_path)
    refuse_other_tiny_model(_config(tmp_path, "rollout.max_new_tokens=9"))
    refuse_other_tiny_model(_config(tmp_path, "model=models/any", "seed=1"))
    assert _refusal(lambda: refuse_other_tiny_model(_config(tmp_path, "seed=1"))).splitlines()[0] == (
        f"seed must be 0 as in {path} (the tiny model in run_dir is of that run), got 1"
    )


def test_a_tiny_model_is_made_again_for_another_family_or_seed_or_after_a_kill_and_else_kept(tmp_path: Path) -> None:
    def weights(*overrides: str) -> Path:
        return model_folder(_config(tmp_path, *overrides)) / "model.safetensors"

    first = load_file(weights())
    made_at = weights().stat().st_mtime_ns
    assert weights().stat().st_mtime_ns == made_at
    other_seed = load_file(weights("seed=1"))
    assert other_seed.keys() == first.keys()
    assert not other_seed["model.embed_tokens.weight"].equal(first["model.embed_tokens.weight"])
    assert "lm_head.weight" in load_file(weights("model=tiny:llama"))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "llama"
    again = weights()
    again.unlink()
    (tmp_path / "model" / "made_of").unlink()  # as a kill in the middle leaves it: config.json, no weights
    assert all(tensor.equal(first[name]) for name, tensor in load_file(weights()).items())


def _edited(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda folder: _edited(folder, model_type="nope"), "model must be a folder whose config.json transformers"),
        (lambda folder: _edited(folder, hidden_size="abc"), "model must be a folder whose config.json transformers"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model must be a folder whose config.json transf"),
        (lambda folder: _edited(folder, model_type="t5"), "model must be a causal language model, got t5 in"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model must have model.safetensors or model.safeten"),
        (_without_a_tensor, "model must have the tensor model.norm.weight [64], got qwen3 in"),
        (
            lambda folder: _edited(folder, intermediate_size=96),
            "model must have model.layers.0.mlp.gate_proj.weight",
        ),
        (
            lambda folder: _edited(folder, max_position_embeddings=40),
            "rollout.max_prompt_tokens + rollout.max_new_tokens must be at most 40, the max_position_embeddings of",
        ),
        (
            lambda folder: _edited(folder, max_position_embeddings=60),
            "engine.vllm.max_model_len must be at most 60, the max_position_embeddings of",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_before_the_engine_is_built(
    tmp_path: Path, tiny_models: dict[str, Path], edit: Callable[[Path], Any], told: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models["qwen3"], folder)
    config = _config(tmp_path / "run", f"model={folder}")
    check_model(config, folder, True)
    edit(folder)
    assert _refusal(lambda: check_model(config, folder, True)).splitlines()[0].startswith(told)


def test_a_broken_tokenizer_is_refused_by_the_options_name(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    shutil.copytree(tiny_models["qwen3"], tmp_path, dirs_exist_ok=True)
    assert read_tokenizer(tmp_path)("ab")["input_ids"] == read_tokenizer(tiny_models["qwen3"])("ab")["input_ids"]
    (tmp_path / "tokenizer.json").write_text("{")
    told = _refusal(lambda: read_tokenizer(tmp_path))
    assert told.startswith(f"model must be a folder whose tokenizer transformers reads, got {str(tmp_path)!r}: ")


def _torchrun(*words: str, num_ranks: int = 2) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", *words]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, timeout=120)


def test_more_ranks_than_gpus_are_refused_once_and_by_all(tmp_path: Path) -> None:
    script = tmp_path / "two_gpus.py"
    script.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from colo.start import refuse_more_ranks_than_gpus\n"
        "refuse_more_ranks_than_gpus(2)\n"
        "time.sleep(100)  # where a rank that has a GPU waits for the others\n"
    )
    done = _torchrun(str(script), num_ranks=4)
    assert done.stderr.count("refused: ranks per host must be at most its number of GPUs 2, got 4\n") == 1, done.stderr
    assert done.stderr.count("refused") == 1
    _, _, root_cause = done.stderr.partition("Root Cause (first observed failure)")
    assert "rank      : 2" in root_cause
    assert "exitcode  : 2" in root_cause


def test_a_finished_run_says_so_and_one_with_other_options_is_refused_however_it_is_started(
    tmp_path: Path, whole_run: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole_run, run_dir)
    told = f"seed must be 0 as in {run_dir}/config.yaml (a resumed run keeps its options), got 1\n"
    assert f"colo: {told}" in train(run_dir, *WHOLE, "seed=1", expect=2).output
    by_torchrun = _torchrun("-m", "colo.train", *DEBUG, f"run_dir={run_dir}", *WHOLE, "seed=1")
    assert by_torchrun.stderr.count(f"refused: {told}") == 1, by_torchrun.stderr
    assert numbers(run_dir) == numbers(whole_run)

    assert train(run_dir, *WHOLE, "rollout.save=0").output.count("already complete at step 8") == 1
    assert numbers(run_dir) == numbers(whole_run)


def _score_and_build(ranks: Ranks, folder: Path, run_dir: Path) -> dict[str, Any]:
    prompt = Prompt(row=0, token_ids=[5], text="a", fields={})
    completions = [
        Completion(slot=0, sample=s, token_ids=[5], logprobs=[0.0], finish_reason="stop", spans=[], num_cached_tokens=0)
        for s in range(3)
    ]
    with Rewards({"colo.rl.tasks.letters_reward": 1.0}, ScoringConfig()) as rewards:
        scorer = Scorer(ranks, rewards, AutoTokenizer.from_pretrained(folder))
        scorer.score([Group(slot=0, prompt=prompt, completions=completions)], "step 4: scoring")
    engine = Engine(_config(run_dir), ranks, folder, stand_ins(folder, torch.float32))
    metrics = engine.take_metrics()
    return {"progress": ranks._read("progress/0"), "areas": {name.rpartition("/")[0] for name in metrics}}


def test_scoring_says_how_far_it_is_and_the_sleep_after_the_build_is_in_no_steps_times(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    (saw,) = run_ranks(_score_and_build, tiny_models["qwen3"], tmp_path, world_size=1)
    assert saw == {"progress": "step 4: scoring, 1 of 3 done", "areas": {"memory_gib/build"}}


def test_prompts_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    launch = train(tmp_path / "run", "prompts=tests.reward_functions.rows_of_this_rank", expect=1)
    assert launch.output.count("refused: prompts must be the same on every rank, got other rows") == 1
    assert "on rank 1" in launch.output


def test_a_prompts_function_that_raises_is_refused_with_its_traceback(tmp_path: Path) -> None:
    launch = train(tmp_path / "run", "prompts=tests.reward_functions.no_rows", expect=1)
    told = "refused: prompts must be a function that returns rows, got tests.reward_functions.no_rows, which raised"
    assert launch.output.count(f"{told} ValueError: no rows today") == 1
    assert "in no_rows" in launch.output


def test_a_damaged_line_of_metrics_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _run(run_dir)
    (run_dir / "prompts.sha256").unlink()
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    launch = train(run_dir, expect=1)
    assert launch.output.count("must hold one JSON object a line, got line 2: 'not json'") == 1
    assert "refused: " in launch.output
