"""The reload on the real vLLM CPU backend, two ranks: an engine holds what the policy holds, by every way there is.

One engine serves all policies and transports in turn, since it costs many seconds to build.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from colo.engine.cpu import repack_experts
from colo.engine.engine import Engine
from colo.engine.peers import PolicyShards
from colo.policy.model import Policy
from colo.policy.shard import stand_ins
from colo.ranks import Ranks
from tests.engines import engine_config, greedy_tokens
from tests.ranks import run_ranks
from tests.rollouts import as_batch, made_up_rows, policy_config

CASES = [("qwen2", 2), ("qwen3_moe", 1)]
SLOW_CASES = [
    ("qwen2", 1), ("qwen3_moe", 2), ("qwen3", 1), ("qwen3", 2), ("llama", 1), ("llama", 2), ("gemma3", 1), ("gemma3", 2)
]  # fmt: skip
NUM_STEPS = 5


def _matrix(ranks: Ranks, folder: Path, family: str, dtype: str, saved: Path) -> dict[str, Any]:
    """Five optimizer steps with a level-2 cycle each, every time by each transport and from whole tensors."""
    config = engine_config(compute_dtype=dtype)
    engine = Engine(config, ranks, folder, stand_ins(folder, torch.float32))
    policy = Policy(policy_config(folder), ranks, folder)
    rows = made_up_rows(4)[ranks.rank :: ranks.world_size]
    saw: dict[str, Any] = {"wrong": [], "tokens": [], "metrics": {}, "route": dict(engine._reloader.route.by_bracket)}
    by_transport = {}
    for transport in ("peer", "gather"):
        by_transport[transport] = PolicyShards(ranks, transport)
    for step in range(NUM_STEPS):
        policy.update(as_batch([[row] for row in rows]))
        whole = {name: tensor.clone() for name, tensor in policy.full_weights()}
        for way in ("peer", "gather", "whole"):
            engine._reloader._shards, engine._reloader._replay = (
                by_transport.get(way, PolicyShards(ranks, "auto")),
                None,
            )
            with engine.awake(policy.weights() if way != "whole" else whole.items(), version=str(step)):
                held = _copied(engine)
                if step == NUM_STEPS - 1:
                    saw["tokens"].append(greedy_tokens(engine))
                saw["metrics"][way] = engine.take_metrics()
                _load_by_vllm(engine, whole)
                saw["wrong"] += [
                    (step, way, name) for name, value in _copied(engine).items() if not _same(value, held[name])
                ]
    if ranks.is_main:
        shutil.copytree(folder, saved, dirs_exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in whole.items()}, saved / "model.safetensors")
    dist.barrier()
    if not engine._reloader.route.packed:  # vLLM's own reload leaves packed experts wrong
        with engine.awake(whole.items(), version="vllm"):
            engine._parts.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(saved)})
            engine.reset_prefix_cache()
            saw["tokens"].append(greedy_tokens(engine))
    saw["gap"] = engine.state.phase
    engine.close()
    return saw


def _copied(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine._parts.model.state_dict().items()}


def _load_by_vllm(engine: Engine, whole: dict[str, Tensor]) -> None:
    with torch.no_grad():
        engine._parts.model.load_weights((n, t.to(engine._parts.dtype)) for n, t in whole.items())  # type: ignore[operator]
    repack_experts(engine._reloader.route.packed)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b)


def _fresh(ranks: Ranks, folder: Path) -> list[list[int]]:
    """Greedy tokens of an engine that was built from the folder and reloaded once with its own tensors."""
    weights = load_file(folder / "model.safetensors")
    engine = Engine(engine_config(), ranks, folder, [(name, t.to("meta")) for name, t in weights.items()])
    with engine.awake(weights.items(), "fresh"):
        tokens = greedy_tokens(engine)
    engine.close()
    return tokens


@pytest.mark.parametrize(
    ("family", "size"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_the_engine_holds_what_the_policy_holds_whatever_the_way(
    tiny_models: dict[str, Path], tmp_path: Path, family: str, size: int
) -> None:
    saw = run_ranks(_matrix, tiny_models[family], family, "float32", tmp_path / "saved", tensor_parallel_size=size)
    for rank in saw:
        assert rank["route"] == {}
        assert rank["wrong"] == []
        assert all(tokens == rank["tokens"][0] for tokens in rank["tokens"])
        peer, gather, whole = (rank["metrics"][way] for way in ("peer", "gather", "whole"))
        assert peer["reload/bytes"] == gather["reload/bytes"] == whole["reload/bytes"] > 0
        assert peer["reload/peer_bytes"] > 0
        assert peer["reload/extra_bytes"] == whole["reload/extra_bytes"] == 0
        assert gather["reload/gather_bytes"] > 0
        assert 0 < gather["reload/extra_bytes"] <= 256 << 20
    if (family, size) in {("qwen3_moe", 1), ("llama", 2)}:
        fresh = run_ranks(_fresh, tmp_path / "saved", tensor_parallel_size=size)
        assert [tokens for tokens in fresh] == [rank["tokens"][0] for rank in saw]
