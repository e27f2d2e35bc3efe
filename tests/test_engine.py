"""The engine on the real vLLM CPU backend, two ranks: independent replicas, and one engine over both.

One engine costs many seconds, so each configuration is built once, a rank function goes through its life, and the
tests below look at what it saw.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colo.engine.engine import Engine
from colo.policy.shard import stand_ins
from colo.ranks import Ranks
from colo.rng import rng_state, seed_generators
from colo.types import Request
from tests.engines import GREEDY, PROMPT, SAMPLING, engine_config, gap_to_transformers, make_requests, refusal
from tests.ranks import run_ranks

CASES = [("qwen3", 1), ("llama", 2)]
SLOW_CASES = [("qwen3_moe", 1), ("qwen3_moe", 2), ("qwen2", 1), ("gemma3", 2)]
"""`test_reload.py` takes every family at both sizes through its cycles."""


def _more_than_a_step_takes() -> list[Request]:
    """Seeded prompts of 4,800 tokens in all: on CPU a step takes 4,096, and cannot take a part of a seeded prompt."""
    return [
        Request(slot=slot, sample=0, prompt_token_ids=[slot, *PROMPT[1:]], seed=slot, max_new_tokens=2)
        for slot in range(2, 122)
    ]


def _life(ranks: Ranks, folder: Path, family: str) -> dict[str, Any]:
    """What one rank sees of an engine from build to close."""
    seed_generators(5, ranks.rank)
    generators = rng_state(ranks.device)
    engine = Engine(engine_config(), ranks, folder, stand_ins(folder, torch.float32))
    saw: dict[str, Any] = {
        "generators_kept": rng_state(ranks.device) == generators,
        "after_build": str(engine.state),
    }
    sleep = engine._parts.cpu_sleep
    assert sleep is not None
    held = sum(
        {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine._parts.model.parameters()}.values()
    )
    saw["asleep_bytes"] = (held, sleep.freed_bytes)
    weights = load_file(folder / "model.safetensors")
    saw["refused_asleep"] = [
        refusal(lambda: engine.generate(make_requests(0), SAMPLING)),
        refusal(lambda: engine.reload(weights.items(), "0")),
        refusal(lambda: engine.wake_up(["kv_cache"])),
    ]

    engine.wake_up()
    saw["woken_is_nan"] = all(bool(p.isnan().all()) for p in engine._parts.model.parameters() if p.is_floating_point())
    saw["refused_unloaded"] = refusal(lambda: engine.generate(make_requests(0), SAMPLING))
    engine.sleep()

    tokens, completions = [], []
    for version in range(2):
        with engine.awake(weights.items(), str(version)):
            completions = engine.generate(make_requests(0), SAMPLING)
            tokens.append([completion.token_ids for completion in completions])
            saw["cached"] = [completion.num_cached_tokens for completion in completions]
            saw["spans"] = [(s.version, s.start, s.end) for c in completions for s in c.spans]
        saw["after_awake"] = str(engine.state)
    with engine.awake(weights.items(), "many"):
        saw["many"] = [len(completion.logprobs) for completion in engine.generate(_more_than_a_step_takes(), SAMPLING)]
    saw["tokens"] = tokens
    saw["gap"] = gap_to_transformers(folder, weights, completions)
    saw["metrics"] = engine.take_metrics()

    generator = torch.Generator().manual_seed(1)
    moved = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in weights.items()}
    with engine.awake(moved.items(), "moved"):
        greedy = engine.generate(make_requests(0), GREEDY)
        saw["greedy_agree"] = len({tuple(c.token_ids) for c in greedy}) == 1
        saw["moved_gap"] = gap_to_transformers(folder, moved, greedy)
        saw["moved_tokens"] = [c.token_ids for c in engine.generate(make_requests(0), SAMPLING)]

    saw["half"] = _fail_half_way(engine, weights)
    saw["in_flight"] = _sleep_with_requests(engine, weights, depth="1" if family == "llama" else "2")
    saw["by_hand"] = _drive_by_hand(engine, weights)
    if ranks.tensor_parallel_size == 2:
        with engine.awake(weights.items(), "desync"):
            with pytest.raises(RuntimeError) as differ:
                engine.generate(make_requests(0, max_new_tokens=3, seed_offset=ranks.rank), SAMPLING)
            saw["desync"] = str(differ.value)
    engine.close()
    return saw


def _fail_half_way(engine: Engine, weights: dict[str, torch.Tensor]) -> list[str]:
    """A reload that leaves a parameter out, then a whole one."""
    engine.wake_up()
    part = dict(weights)
    del part["model.norm.weight"]
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared below
        engine.reload(part.items(), "half")
    said = [str(error.value), str(engine.state), refusal(lambda: engine.generate(make_requests(0), SAMPLING))]
    engine.reload(weights.items(), "whole")
    said.append(str(engine.state))
    engine.sleep()
    return said


def _sleep_with_requests(engine: Engine, weights: dict[str, torch.Tensor], depth: str) -> dict[str, Any]:
    """Requests that are in flight over a sleep and a reload go on after it."""
    with engine.awake(weights.items(), "a"):
        uninterrupted = [c.token_ids for c in engine.generate(make_requests(0), GREEDY)]
    engine.wake_up()
    engine.reload(weights.items(), "a")
    for request in make_requests(0):
        engine.submit(request, GREEDY)
    for _ in range(5):
        engine.step()
    refused = refusal(lambda: engine.reload(weights.items(), "b"))
    engine.sleep(depth)
    engine.wake_up(["weights"])
    engine.reload(weights.items(), "b")
    engine.wake_up(["kv_cache"])
    while engine._requests:
        engine.step()
    completions = sorted(engine.finished(), key=lambda c: (c.slot, c.sample))
    engine.sleep()
    return {
        "refused": refused,
        "same": [c.token_ids for c in completions] == uninterrupted,
        "versions": [[span.version for span in c.spans] for c in completions],
        "covered": [(c.spans[0].start, c.spans[0].end == c.spans[1].start, c.spans[1].end) for c in completions],
    }


def _drive_by_hand(engine: Engine, weights: dict[str, torch.Tensor]) -> list[str]:
    """Labels and worker calls, each followed by the state it leads to."""
    engine.wake_up()
    engine.reload(weights.items(), "1")
    saw = [str(engine.state)]
    engine.update_weight_version("one")
    saw.append(str(engine.state))
    names = engine.collective_rpc(lambda worker: len(list(worker.get_model().named_parameters())), read_only=True)
    assert names > 0
    saw.append(str(engine.state))
    engine.collective_rpc(lambda worker: None)
    saw.append(str(engine.state))
    engine.sleep("none")
    saw.append(str(engine.state))
    engine.reload(weights.items(), "2")
    saw.append(str(engine.state))
    engine.sleep("1")
    engine.wake_up(["weights"])
    kept = dict(engine._parts.model.named_parameters())["model.norm.weight"]
    saw.append(f"{engine.state} kept={torch.equal(kept, weights['model.norm.weight'])}")
    engine.sleep("2")
    return saw


@pytest.fixture(
    scope="module", params=[*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)], ids=str
)
def life(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> tuple[str, int, list[dict[str, Any]]]:
    """(family, tensor-parallel size, what each rank saw)."""
    family, size = request.param
    return family, size, run_ranks(_life, tiny_models[family], family, tensor_parallel_size=size)


def test_an_engine_lives_by_its_states(life: tuple[str, int, list[dict[str, Any]]]) -> None:
    _, _, saw = life
    for rank in saw:
        assert rank["after_build"] == "ASLEEP(2)"
        assert [message.split(": ")[1].split(" is")[0] for message in rank["refused_asleep"]] == [
            "generate",
            "reload",
            'wake_up(["kv_cache"])',
        ]
        assert rank["refused_unloaded"].startswith("engine is STALE(woken, not reloaded): generate is refused")
        assert rank["after_awake"] == "ASLEEP(2)"
        assert rank["by_hand"] == [
            "READY(1)",
            "READY(one)",
            "READY(one)",
            "STALE(collective_rpc)",
            "STALE(slept at depth none)",
            "READY(2)",
            "STALE(woken, not reloaded) kept=True",
        ]


def test_building_leaves_every_generator_as_it_was(life: tuple[str, int, list[dict[str, Any]]]) -> None:
    assert all(rank["generators_kept"] for rank in life[2])


def test_sleep_frees_the_weights_and_a_wake_without_a_reload_holds_nan(
    life: tuple[str, int, list[dict[str, Any]]],
) -> None:
    for rank in life[2]:
        assert rank["asleep_bytes"][0] == 0
        assert rank["asleep_bytes"][1] > 30 << 20  # 32 MiB of KV cache and the weights
        assert rank["woken_is_nan"]


def test_engine_logprobs_are_those_of_the_reloaded_weights(life: tuple[str, int, list[dict[str, Any]]]) -> None:
    for rank in life[2]:
        assert rank["gap"] < 1e-5
        assert rank["moved_gap"] < 2e-5
        assert rank["moved_tokens"] != rank["tokens"][0]


def test_the_same_weights_and_seeds_give_the_same_tokens_after_a_cycle(
    life: tuple[str, int, list[dict[str, Any]]],
) -> None:
    _, _, saw = life
    for rank in saw:
        assert rank["tokens"][0] == rank["tokens"][1]
        assert rank["greedy_agree"]
    assert saw[0]["tokens"] == saw[1]["tokens"]  # seeds follow from (seed, step, slot, sample) alone
    assert len({tuple(tokens) for tokens in saw[0]["tokens"][0]}) == 4  # and differ between requests


def test_every_token_says_which_weights_made_it(life: tuple[str, int, list[dict[str, Any]]]) -> None:
    for rank in life[2]:
        assert rank["spans"] == [("1", 0, len(tokens)) for tokens in rank["tokens"][1]]


def test_the_first_request_after_a_reload_finds_no_cached_prefix(life: tuple[str, int, list[dict[str, Any]]]) -> None:
    assert all(rank["cached"][0] == 0 for rank in life[2])


def test_a_reload_that_leaves_a_parameter_out_is_stale_until_a_whole_one(
    life: tuple[str, int, list[dict[str, Any]]],
) -> None:
    for rank in life[2]:
        missing, state, refused, repaired = rank["half"]
        assert missing == "weights must be the tensors that the engine was built for, got no model.norm.weight"
        assert state == "STALE(a reload did not finish)"
        assert refused.startswith("engine is STALE")
        assert repaired == "READY(whole)"


def test_more_seeded_prompts_than_a_step_takes_are_sampled_to_their_end(
    life: tuple[str, int, list[dict[str, Any]]],
) -> None:
    for rank in life[2]:
        assert len(rank["many"]) == 120
        assert set(rank["many"]) <= {1, 2}  # one that drew the end token has one


def test_ranks_of_one_engine_that_sample_apart_are_named(life: tuple[str, int, list[dict[str, Any]]]) -> None:
    _, size, saw = life
    if size == 2:
        assert {rank["desync"] for rank in saw} == {
            "rollout: the ranks of one engine sampled different tokens: rank 0 and rank 1"
        }


def test_requests_in_flight_go_on_after_a_sleep_and_a_reload(life: tuple[str, int, list[dict[str, Any]]]) -> None:
    for rank in life[2]:
        assert "4 requests are in flight" in rank["in_flight"]["refused"]
        assert rank["in_flight"]["same"]
        assert rank["in_flight"]["versions"] == [["a", "b"]] * 4
        assert rank["in_flight"]["covered"] == [(0, True, 12)] * 4


def test_switches_are_timed(life: tuple[str, int, list[dict[str, Any]]]) -> None:
    for rank in life[2]:
        held = {name: value for name, value in rank["metrics"].items() if name.startswith("memory_gib/")}
        metrics = {name: value for name, value in rank["metrics"].items() if name not in held}
        assert held["memory_gib/build/total"] > 0
        assert metrics.keys() == {f"switch/{what}_s" for what in ("sleep", "wake", "reload", "prove")} | {
            f"reload/{what}" for what in ("bytes", "peer_bytes", "gather_bytes", "extra_bytes")
        }
        assert all(metrics[f"switch/{what}_s"] > 0 for what in ("sleep", "wake", "reload", "prove"))
        assert metrics["reload/bytes"] > 0
        assert metrics["reload/peer_bytes"] == metrics["reload/extra_bytes"] == 0  # every rank has all weights itself
