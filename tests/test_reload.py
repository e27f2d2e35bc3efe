"""The reload on the real vLLM CPU backend, two ranks: an engine holds what the policy holds, by every way there is.

One engine serves all policies, transports and chunks in turn, since it costs many seconds to build.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import colo.ranks
from colo.engine.engine import Engine
from colo.engine.peers import PolicyShards
from colo.policy.model import Policy
from colo.policy.shard import stand_ins
from colo.ranks import Ranks
from tests import by_hand
from tests.engines import differing, engine_config, greedy_logprobs, held_by, load_by_vllm
from tests.ranks import run_ranks
from tests.rollouts import as_batch, made_up_rows, policy_config

CASES = [("qwen2", 2, "float32"), ("qwen3_moe", 1, "float32")]
SLOW_CASES = [
    *[(family, size, "float32") for family in ("qwen3", "llama", "gemma3") for size in (1, 2)],
    ("qwen2", 1, "float32"),
    ("qwen3_moe", 2, "float32"),
    ("qwen3", 1, "bfloat16"),
]
FRESH_CASES = [("qwen3_moe", 1, "float32"), ("llama", 2, "float32")]
NORM = "model.norm.weight"
GLM4_MOE = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
NUM_STEPS = 5
NUM_CYCLES = 50
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One engine's life."""

    family: str
    saved: Path
    """The folder of the last weights."""
    saw: list[dict[str, Any]]
    """What each rank saw."""


def _matrix(ranks: Ranks, folder: Path, dtype: str, saved: Path) -> dict[str, Any]:
    """Five optimizer steps with a level-2 cycle each, every time by each transport and from whole tensors."""
    colo.ranks.GIVE_WAY_S = 0.0  # no process ends here
    engine = Engine(engine_config(compute_dtype=dtype), ranks, folder, stand_ins(folder, torch.float32))
    policy = Policy(policy_config(folder, policy={"compute_dtype": dtype}), ranks, folder)
    rows = made_up_rows(4)[ranks.rank :: ranks.world_size]
    saw: dict[str, Any] = {"wrong": [], "logprobs": [], "metrics": {}, "route": dict(engine._reloader.route.by_bracket)}
    shards = {transport: PolicyShards(ranks, transport) for transport in ("peer", "gather", "auto")}
    whole = {}
    for step in range(NUM_STEPS):
        policy.update(as_batch([[row] for row in rows]))
        whole = {name: tensor.clone() for name, tensor in policy.full_weights()}
        for way, transport in (("peer", "peer"), ("gather", "gather"), ("whole", "auto")):
            engine._reloader._shards, engine._reloader._replay = shards[transport], None
            weights = whole.items() if way == "whole" else policy.weights()
            with engine.awake(weights, version=str(step)):
                held = held_by(engine)
                if step == NUM_STEPS - 1:
                    saw["logprobs"].append(greedy_logprobs(engine))
                saw["metrics"][way] = engine.take_metrics()
                load_by_vllm(engine, whole.items())
                saw["wrong"] += [(step, way, name) for name in differing(engine, held)]
    if ranks.is_main:
        shutil.copytree(folder, saved, dirs_exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in whole.items()}, saved / "model.safetensors")
    dist.barrier()
    if not engine._reloader.route.packed:  # vLLM's own reload leaves packed experts wrong
        with engine.awake(whole.items(), version="vllm"):
            engine._parts.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(saved)})
            engine.reset_prefix_cache()
            saw["logprobs"].append(greedy_logprobs(engine))
    saw["packed"] = bool(engine._reloader.route.packed)
    saw["by_hand"] = by_hand.drive(engine, policy)
    engine.close()
    return saw


def _fresh(ranks: Ranks, folder: Path) -> list[list[float]]:
    """Greedy logprobs of an engine that was built from the folder and reloaded once with its own tensors."""
    weights = load_file(folder / "model.safetensors")
    engine = Engine(engine_config(), ranks, folder, [(name, tensor.to("meta")) for name, tensor in weights.items()])
    with engine.awake(weights.items(), "fresh"):
        logprobs = greedy_logprobs(engine)
    engine.close()
    return logprobs


@pytest.fixture(
    scope="module", params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)], ids=str
)
def matrix(
    request: pytest.FixtureRequest, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Matrix:
    """By family, tensor-parallel size, and dtype of the engine; the policy's is float32."""
    family, size, dtype = request.param
    saved = tmp_path_factory.mktemp("matrix") / "saved"
    saw = run_ranks(_matrix, tiny_models[family], dtype, saved, tensor_parallel_size=size)
    return Matrix(family=family, saved=saved, saw=saw)


def test_the_engine_holds_what_the_policy_holds_whatever_the_way(matrix: Matrix) -> None:
    for rank in matrix.saw:
        assert rank["route"] == {}
        assert rank["wrong"] == []
        assert all(logprobs == rank["logprobs"][0] for logprobs in rank["logprobs"])
        peer, gather, whole = (rank["metrics"][way] for way in ("peer", "gather", "whole"))
        assert peer["reload/bytes"] == gather["reload/bytes"] == whole["reload/bytes"] > 0
        assert peer["reload/peer_bytes"] > 0
        assert peer["reload/extra_bytes"] == whole["reload/extra_bytes"] == 0
        assert gather["reload/gather_bytes"] > 0
        assert 0 < gather["reload/extra_bytes"] <= 256 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("matrix", FRESH_CASES, indirect=True, ids=str)
def test_a_fresh_engine_generates_the_same(matrix: Matrix) -> None:
    size = dict((family, size) for family, size, _ in FRESH_CASES)[matrix.family]
    fresh = run_ranks(_fresh, matrix.saved, tensor_parallel_size=size)
    assert fresh == [rank["logprobs"][0] for rank in matrix.saw]


def test_each_state_refuses_what_it_cannot_do_and_says_what_comes_next(matrix: Matrix) -> None:
    none, asleep = "no weight update is under way", 'wake_up(["weights"]), or awake(weights, version)'
    half, end = "its weights are half old, half new", "finish_weight_update or cancel_weight_update"
    by_chunks = ("update_weights", "finish_weight_update", "cancel_weight_update")
    stale, theirs = "STALE(woken, not reloaded)", "its weights are not those of the policy"
    started, flying = "start_weight_update", "step until they are finished, abort or pause_generation"
    expected = {
        "asleep": [
            *[("ASLEEP(2)", call, "it has no weights", asleep) for call in ("reload", started, "generate")],
            *[("ASLEEP(2)", call, none, asleep) for call in by_chunks],
        ],
        "woken": [
            (stale, "generate", theirs, "awake(weights, version)"),
            *[(stale, call, none, started) for call in by_chunks],
        ],
        "ready": [("READY(1)", call, none, started) for call in by_chunks],
        "updating": [
            ("UPDATING", call, half, end) for call in (started, "reload", "sleep", "generate", 'wake_up(["weights"])')
        ],
        "in flight": [("READY(1)", call, "1 requests are in flight", flying) for call in ("reload", started)],
    }
    for rank in matrix.saw:
        for moment, refusals in expected.items():
            told = [f"engine is {at}: {call} is refused ({why}); call {then}" for at, call, why, then in refusals]
            assert rank["by_hand"]["guards"][moment] == told
        assert rank["by_hand"]["guards"].keys() == expected.keys()


def test_chunks_change_what_they_bring_and_nothing_else(matrix: Matrix) -> None:
    for rank in matrix.saw:
        saw = rank["by_hand"]["chunks"]
        assert saw["states"] == ["UPDATING", "UPDATING", "READY(2)"]
        assert len(saw["first"]) > 5
        assert all(name.startswith(by_hand.FIRST) for name in saw["first"])
        assert saw["query"] == [f"{by_hand.SECOND}self_attn.qkv_proj.weight"]
        assert saw["query_kept"] == [False, True], "the query's rows changed, and those of key and value did not"
        assert len(saw["second"]) > 3
        assert all(name.startswith(by_hand.SECOND) and "norm" not in name for name in saw["second"])
        assert saw["wrong"] == []
        assert saw["spans"] == {("2", 0)}


def test_a_tensor_that_no_chunk_brought_must_be_as_it_was(matrix: Matrix) -> None:
    wrong = f"the engine does not hold what the policy handed over: {NORM} (from {NORM})"
    ends = ["STALE(a weight update did not finish)", "READY(repaired)"]
    told = f"proving the reload failed on rank 1: RuntimeError: {wrong}"
    assert [rank["by_hand"]["tampered"] for rank in matrix.saw] == [[told, *ends], [wrong, *ends]]


def test_weights_that_were_lost_are_all_asked_for_before_an_update_ends(matrix: Matrix) -> None:
    for rank in matrix.saw:
        refused, still, name, *end = rank["by_hand"]["lost"]
        assert refused.startswith(f"engine is UPDATING: finish_weight_update is refused (no chunk brought {name}, ")
        assert refused.endswith("; call update_weights with them, or cancel_weight_update")
        assert (still, end) == ("UPDATING", ["READY(4)"])
        stale, generate, refused, *end = rank["by_hand"]["cancelled"]
        assert stale == "STALE(a weight update was cancelled)"
        assert generate.startswith(f"engine is {stale}: generate is refused")
        assert "finish_weight_update is refused (no chunk brought model.embed_tokens.weight, " in refused
        assert end == ["READY(7)"]


def test_a_chunk_that_failed_half_way_must_come_again(matrix: Matrix) -> None:
    stale = "STALE(a weight update did not finish)"
    name = f"{by_hand.FIRST}self_attn.o_proj.weight"
    refused = (
        f"engine is UPDATING: finish_weight_update is refused (no chunk brought {name}); call update_weights with "
        f"them, or cancel_weight_update"
    )
    told = [["reload failed on rank 1: OSError: planted", stale, refused], ["planted", stale, refused]]
    assert [rank["by_hand"]["half_a_chunk"] for rank in matrix.saw] == told


def test_experts_that_are_packed_together_are_brought_together(matrix: Matrix) -> None:
    for rank in matrix.saw:
        if not rank["packed"]:
            continue
        others = ", ".join(f"{by_hand.SECOND}mlp.experts.{expert}.gate_proj.weight" for expert in range(1, 6))
        assert f"(no chunk brought {others} and 18 more)" in rank["by_hand"]["one_expert"]


@pytest.mark.slow
def test_a_router_bias_that_is_a_buffer_of_the_policy_is_reloaded(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "glm4_moe"
    shutil.copytree(tiny_models["qwen3_moe"], folder)  # for its tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["glm4_moe"](**GLM4_MOE), dtype=torch.float32)
    model.save_pretrained(folder)
    for rank in run_ranks(_router_bias, folder):
        assert rank["source"] == ["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert rank["state"] == "READY(2)"
        assert rank["held"] == [pytest.approx(rank["bias"])]
        assert rank["wrong"] == []


def _router_bias(ranks: Ranks, folder: Path) -> dict[str, Any]:
    engine = Engine(engine_config(), ranks, folder, stand_ins(folder, torch.float32))
    policy = Policy(policy_config(folder), ranks, folder)
    engine.wake_up()
    engine.reload(policy.weights(), "1")
    for name, shard in policy.weights():
        if name.endswith("e_score_correction_bias"):
            shard.local.copy_(torch.linspace(0.5, 2, shard.local.numel()))
    whole = {name: tensor.clone() for name, tensor in policy.full_weights()}
    biases = [name for name in whole if name.endswith("e_score_correction_bias")]
    engine.reload(policy.weights(), "2")
    held = held_by(engine)
    load_by_vllm(engine, whole.items())
    saw = {"source": biases, "state": str(engine.state), "bias": whole[biases[0]].tolist()}
    saw["held"] = [held[name].tolist() for name in held if name.endswith("gate.e_score_correction_bias")]
    saw["wrong"] = differing(engine, held)
    engine.close()
    return saw


@pytest.mark.slow
def test_many_cycles_leave_tokens_and_memory_as_they_are(tiny_models: dict[str, Path]) -> None:
    (saw,) = run_ranks(_cycles, tiny_models["qwen3"], world_size=1)
    assert all(logprobs == saw["logprobs"][0] for logprobs in saw["logprobs"])
    assert len(saw["resident"]) == NUM_CYCLES
    assert max(saw["resident"][2:]) - saw["resident"][1] < 8 * MIB


def _cycles(ranks: Ranks, folder: Path) -> dict[str, Any]:
    engine = Engine(engine_config(), ranks, folder, stand_ins(folder, torch.float32))
    policy = Policy(policy_config(folder), ranks, folder)
    process, saw = psutil.Process(), {"logprobs": [], "resident": []}
    for cycle in range(NUM_CYCLES):
        with engine.awake(policy.weights(), version=str(cycle)):
            saw["logprobs"].append(greedy_logprobs(engine))
        saw["resident"].append(process.memory_info().rss)
    engine.close()
    return saw
