"""What only a GPU shows: vLLM's own sleep, bfloat16 on both sides, and the policy beside the engine on one card."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colo.config import Config, EngineConfig, PolicyConfig, RolloutConfig
from colo.engine.engine import Engine
from colo.ranks import Ranks
from tests.launch import read_rows, train
from tests.ranks import run_ranks
from tests.test_engine import GREEDY, SAMPLING, _gap_to_transformers, _refusal, _requests
from tests.test_update import _updates_of_every_kind

pytestmark = pytest.mark.gpu(1)
GIB = 1 << 30
KV_BYTES = 8 * GIB


def _config() -> Config:
    return Config(
        model="tiny:qwen3",
        run_dir="unused",
        prompts="colo.rl.tasks.letters",
        reward="colo.rl.tasks.letters_reward",
        num_steps=1,
        rollout=RolloutConfig(max_prompt_tokens=64, max_new_tokens=32),
        engine=EngineConfig(vllm={"enforce_eager": True, "kv_cache_memory_bytes": KV_BYTES}),
        policy=PolicyConfig(compute_dtype="bfloat16"),
    )


def _free() -> int:
    return torch.cuda.mem_get_info()[0]


def _life(ranks: Ranks, folder: Path) -> dict[str, Any]:
    engine = Engine(_config(), ranks, folder)
    asleep = _free()
    weights = {name: tensor.bfloat16().cuda() for name, tensor in load_file(folder / "model.safetensors").items()}
    saw: dict[str, Any] = {"greedy": [], "sampled": []}
    saw["refused"] = _refusal(lambda: engine.generate(_requests(0), GREEDY))
    greedy = []
    for version, depth in enumerate(("2", "1", "2", "none", "2")):
        engine.wake_up(["weights"])
        saw["unproven"] = _refusal(lambda: engine.generate(_requests(0), GREEDY))
        engine.reload(weights.items(), str(version))
        engine.wake_up(["kv_cache"])
        engine.reset_prefix_cache()
        saw["mapped"] = asleep - _free()
        greedy = engine.generate(_requests(0), GREEDY)
        saw["greedy"].append([c.token_ids for c in greedy])
        saw["sampled"].append([c.token_ids for c in engine.generate(_requests(1), SAMPLING)])
        saw["spans"] = [[(s.version, s.start, s.end) for s in c.spans] for c in greedy]
        engine.sleep(depth)
    saw["freed_again"] = asleep - _free()
    saw["gap"] = _gap_to_transformers(folder, {n: t.float().cpu() for n, t in weights.items()}, greedy)
    saw["timings"] = engine.take_timings()
    engine.close()
    return saw


@pytest.fixture(scope="module")
def life(tiny_models: dict[str, Path]) -> dict[str, Any]:
    """What one rank saw of an engine that slept at every depth."""
    (saw,) = run_ranks(_life, tiny_models["llama"], world_size=1)
    return saw


def test_tokens_do_not_depend_on_how_deep_the_engine_slept(life: dict[str, Any]) -> None:
    assert all(tokens == life["greedy"][0] for tokens in life["greedy"])
    assert all(tokens == life["sampled"][0] for tokens in life["sampled"])
    assert life["spans"] == [[("4", 0, len(tokens))] for tokens in life["greedy"][-1]]


def test_a_sleeping_or_unproven_engine_refuses(life: dict[str, Any]) -> None:
    assert life["refused"].startswith("engine is ASLEEP(2)")
    assert life["unproven"].startswith("engine is STALE(")


def test_sleep_frees_the_kv_cache_and_the_weights(life: dict[str, Any]) -> None:
    assert life["mapped"] > 0.95 * KV_BYTES
    assert life["freed_again"] < 0.05 * KV_BYTES


def test_engine_logprobs_are_those_of_the_reloaded_weights(life: dict[str, Any]) -> None:
    assert life["gap"] < 0.1  # bfloat16 against float32


def _kinds(ranks: Ranks, folders: dict[str, Path]) -> dict[str, list[dict[str, float]]]:
    return {kind: metrics for kind, (_, metrics) in _updates_of_every_kind(ranks, folders).items()}


def test_updates_on_the_gpu_are_those_of_the_cpu(tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (on_gpu,) = run_ranks(_kinds, tiny_models, world_size=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (on_cpu,) = run_ranks(_kinds, tiny_models, world_size=1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    for kind, steps in on_cpu.items():
        if kind == "several":  # steps so large that rounding decides where they lead
            continue
        tolerance = 0.1 if kind == "bfloat16" else 1e-2
        for cpu, gpu in zip(steps, on_gpu[kind], strict=True):
            for name in {"loss", "grad_norm", "gap/mean_abs"} & cpu.keys():
                assert gpu[name] == pytest.approx(cpu[name], rel=tolerance, abs=tolerance), (kind, name)


def test_debug_learns_on_one_gpu(tmp_path: Path) -> None:
    train(tmp_path / "run", "--ranks", "1")
    rewards = [row["reward/mean"] for row in read_rows(tmp_path / "run")]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 >= 0.3
