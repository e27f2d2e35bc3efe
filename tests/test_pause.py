"""Pause, resume and abort on the real vLLM CPU backend: nothing is lost, nothing hangs, each token has its version."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from colo.engine.engine import Engine
from colo.ranks import Ranks
from colo.types import Completion, Request
from tests.engines import GREEDY, PROMPT, SAMPLING, drained, engine_config, in_order, make_requests, refusal
from tests.ranks import run_ranks

NUM_TOKENS = 12
Weights = dict[str, Tensor]


def _submit(engine: Engine, steps: int, step: int = 0) -> list[str]:
    """Requests in flight that have had some scheduler steps; on CPU each gives every one of them a token."""
    ids = [engine.submit(request, SAMPLING) for request in make_requests(step, max_new_tokens=NUM_TOKENS)]
    for _ in range(steps):
        engine.step()
    return ids


def _told(completions: list[Completion]) -> list[tuple[list[int], list[float], list[tuple[str, int, int]], str]]:
    return [
        (c.token_ids, c.logprobs, [(s.version, s.start, s.end) for s in c.spans], c.finish_reason) for c in completions
    ]


def _life(ranks: Ranks, folder: Path) -> dict[str, Any]:
    weights = load_file(folder / "model.safetensors")
    engine = Engine(engine_config(), ranks, folder, [(name, t.to("meta")) for name, t in weights.items()])
    engine.wake_up()
    engine.reload(weights.items(), "a")
    saw: dict[str, Any] = {"whole": _told(engine.generate(make_requests(0, max_new_tokens=NUM_TOKENS), SAMPLING))}
    saw["on_one_rank"] = _on_one_rank(engine, weights, is_there=ranks.rank == 1)
    saw["abort"] = _abort(engine)
    saw["keep"] = {way: _keep(engine, weights, way) for way in ("nothing", "reload", "none", "kv", "1", "2", "label")}
    saw["modes"] = _modes(engine)
    saw["stale_kv"] = _stale_kv(engine, weights)
    saw["asleep"] = _paused_asleep(engine, weights)
    saw["cached"] = _cached(engine, weights)
    engine.wake_up()
    engine.reload(weights.items(), "a")
    saw["by_hand"] = _by_hand(engine)
    saw["old_prefix"] = _old_prefix(engine, weights, keeps=ranks.rank == 1)
    saw["num_replicas"] = ranks.num_replicas
    engine.close()
    return saw


def _on_one_rank(engine: Engine, weights: Weights, *, is_there: bool) -> list[str]:
    """What is refused while one replica alone has a request in flight, and what a second pause is told."""
    if is_there or engine._ranks.tensor_parallel_size > 1:
        engine.submit(make_requests(0)[0], SAMPLING)
    told = [refusal(lambda: engine.reload(weights.items(), "b")), refusal(engine.start_weight_update)]
    engine.pause_generation("keep")
    if is_there:
        told.append(refusal(lambda: engine.pause_generation("wait")))
    engine.abort()
    engine.resume_generation()
    return told


def _abort(engine: Engine) -> dict[str, Any]:
    ids = _submit(engine, steps=5)
    with pytest.raises(ValueError, match="must be in flight, got '999'"):
        engine.abort(["999"])
    some = engine.abort(ids[1:3])
    rest = drained(engine)
    all_of_none = engine.abort()
    _submit(engine, steps=0)
    untouched = engine.abort()
    return {"some": _told(some), "rest": _told(rest), "none": all_of_none, "untouched": _told(untouched)}


def _keep(engine: Engine, weights: Weights, way: str) -> dict[str, Any]:
    """Freeze after five steps, do something in between, go on."""
    _submit(engine, steps=5)
    engine.pause_generation("keep")
    saw: dict[str, Any] = {"paused": engine.is_paused(), "steps": engine.step(), "refused": ""}
    saw["refused"] = refusal(lambda: engine.generate(make_requests(0), SAMPLING))
    digest = engine.prove()
    if way == "reload":
        engine.reload(weights.items(), "b")
    elif way == "label":
        engine.update_weight_version("b")
    elif way != "nothing":
        engine.sleep(way)
        engine.wake_up(["weights"])
        engine.reload(weights.items(), "b")
        engine.wake_up(["kv_cache"])
    saw["same_weights"] = engine.prove() == digest
    saw["still_paused"] = engine.is_paused() and engine.step() == 0 and not engine.finished()
    engine.resume_generation()
    saw["told"] = _told(drained(engine))
    engine.update_weight_version("a")
    return saw


def _modes(engine: Engine) -> dict[str, Any]:
    saw: dict[str, Any] = {}
    for mode in ("abort", "wait"):
        _submit(engine, steps=5)
        engine.pause_generation(mode)
        saw[mode] = (len(engine._requests), _told(in_order(engine.finished())))
        late = engine.submit(make_requests(0, max_new_tokens=NUM_TOKENS)[0], SAMPLING)
        saw[f"{mode}_late"] = (late != "", engine.step(), len(engine._requests))
        engine.resume_generation()
        saw[f"{mode}_then"] = _told(drained(engine))
    with pytest.raises(ValueError, match="mode must be one of abort, wait, keep, got 'stop'"):
        engine.pause_generation("stop")
    return saw


def _stale_kv(engine: Engine, weights: Weights) -> dict[str, Any]:
    engine.take_metrics()
    moved = {name: tensor * 1.5 for name, tensor in weights.items()}
    told = {}
    for clear in (True, False):
        _submit(engine, steps=5)
        engine.pause_generation("keep", clear_cache=clear)
        engine.reload(moved.items(), "b")
        engine.resume_generation()
        told[clear] = _told(drained(engine))
        told[f"{clear}_counted"] = engine.take_metrics().get("engine/stale_kv_requests", 0.0)
        engine.reload(weights.items(), "a")
    return told


def _paused_asleep(engine: Engine, weights: Weights) -> dict[str, Any]:
    """A pause and a resume while the engine sleeps; a request that is submitted meanwhile waits for the wake."""
    engine.sleep("2")
    engine.pause_generation("keep")
    engine.submit(make_requests(0, max_new_tokens=NUM_TOKENS)[0], SAMPLING)
    saw: dict[str, Any] = {"refused": refusal(engine.step)}
    engine.resume_generation()
    engine.wake_up(["weights"])
    engine.reload(weights.items(), "a")
    engine.wake_up(["kv_cache"])
    saw["told"] = _told(drained(engine))
    return saw


def _cached(engine: Engine, weights: Weights) -> list[int]:
    """Cached prompt tokens of a request: again, and after a reload, a finished update by chunks, and a cycle."""
    request = Request(slot=0, sample=0, prompt_token_ids=PROMPT, seed=1, max_new_tokens=2)

    def cached() -> int:
        return engine.generate([request], GREEDY)[0].num_cached_tokens

    cached()
    counts = [cached()]
    engine.reload(weights.items(), "a")
    counts.append(cached())
    engine.start_weight_update()
    engine.update_weights(list(weights.items())[:3])
    engine.finish_weight_update("a")
    counts.append(cached())
    engine.sleep("none")
    with engine.awake(weights.items(), "a"):
        counts.append(cached())
    return counts


def _by_hand(engine: Engine) -> dict[str, Any]:
    """Requests by hand for the slots of a `generate`: before it, aborted before it, and named twice in an abort."""
    long, short = make_requests(0, max_new_tokens=NUM_TOKENS)[0], make_requests(0, max_new_tokens=5)[:1]
    engine.submit(long, SAMPLING)
    saw: dict[str, Any] = {"generated": _told(engine.generate(short, SAMPLING)), "left": _told(engine.finished())}
    _submit(engine, steps=3)
    engine.pause_generation("abort")
    engine.resume_generation()
    engine.generate(short, SAMPLING)
    saw["aborted"] = _told(engine.finished())
    ids = _submit(engine, steps=3)
    saw["twice"] = _told(engine.abort([ids[0], ids[0], ids[1]]))
    saw["rest"] = _told(engine.abort())
    return saw


def _old_prefix(engine: Engine, weights: Weights, *, keeps: bool) -> dict[str, Any]:
    """A prompt that was cached with other weights, while one rank, or the engine of both, keeps KV of those."""
    request = Request(slot=0, sample=0, prompt_token_ids=PROMPT, seed=1, max_new_tokens=4)
    moved = {name: tensor * 1.5 for name, tensor in weights.items()}
    engine.reload(moved.items(), "b")
    fresh = engine.generate([request], GREEDY)[0]
    engine.reload(weights.items(), "a")
    engine.generate([request], GREEDY)
    if keeps or engine._ranks.tensor_parallel_size > 1:
        _submit(engine, steps=5)
    engine.pause_generation("keep", clear_cache=False)
    engine.reload(moved.items(), "b")
    engine.resume_generation()
    seen = [engine.generate([request], GREEDY)[0] for _ in range(2)]
    engine.abort()
    engine.finished()
    engine.reload(weights.items(), "a")
    engine.generate([request], GREEDY)
    return {
        "fresh": fresh.logprobs,
        "seen": [completion.logprobs for completion in seen],
        "cached": [completion.num_cached_tokens for completion in seen],
        "cached_again": engine.generate([request], GREEDY)[0].num_cached_tokens,
    }


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def life(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> list[dict[str, Any]]:
    """What each of two ranks saw of its engine, or of the engine that they share."""
    return run_ranks(_life, tiny_models["llama"], tensor_parallel_size=request.param)


def test_a_request_on_one_rank_is_refused_on_every_rank(life: list[dict[str, Any]]) -> None:
    for rank in life:
        assert all("1 requests are in flight" in message for message in rank["on_one_rank"][:2])
    assert "pause_generation is refused (it is paused, so that nothing would finish)" in life[1]["on_one_rank"][2]


def test_an_aborted_request_says_what_it_has_so_far(life: list[dict[str, Any]]) -> None:
    for rank in life:
        whole, abort = rank["whole"], rank["abort"]
        for (tokens, logprobs, spans, reason), (all_tokens, all_logprobs, _, _) in zip(
            abort["some"], whole[1:3], strict=True
        ):
            assert tokens == all_tokens[:5]
            assert logprobs == pytest.approx(all_logprobs[:5], abs=1e-5)
            assert (spans, reason) == ([("a", 0, 5)], "abort")
        assert [tokens for tokens, *_ in abort["rest"]] == [whole[0][0], whole[3][0]]
        assert abort["none"] == []
        assert abort["untouched"] == [([], [], [], "abort")] * 4


def test_kept_requests_go_on_as_if_nothing_had_been(life: list[dict[str, Any]]) -> None:
    for rank in life:
        for way, saw in rank["keep"].items():
            assert saw["paused"]
            assert saw["steps"] == 0
            assert "it is paused" in saw["refused"]
            assert saw["still_paused"]
            assert saw["same_weights"]
            for (tokens, logprobs, spans, reason), (all_tokens, all_logprobs, _, all_reason) in zip(
                saw["told"], rank["whole"], strict=True
            ):
                assert tokens == all_tokens, way
                assert logprobs == pytest.approx(all_logprobs, abs=1e-5)
                assert reason == all_reason
                assert spans == ([("a", 0, 12)] if way == "nothing" else [("a", 0, 5), ("b", 5, 12)])


def test_a_pause_that_aborts_or_waits_leaves_nothing_in_flight(life: list[dict[str, Any]]) -> None:
    for rank in life:
        modes = rank["modes"]
        assert modes["abort"][0] == modes["wait"][0] == 0
        assert [(told[0], told[3]) for told in modes["abort"][1]] == [(w[0][:5], "abort") for w in rank["whole"]]
        assert [told[0] for told in modes["wait"][1]] == [whole[0] for whole in rank["whole"]]
        for mode in ("abort", "wait"):
            assert modes[f"{mode}_late"] == (True, 0, 1)
            assert [told[0] for told in modes[f"{mode}_then"]] == [rank["whole"][0][0]]


def test_kv_of_old_weights_is_used_only_when_asked_for_and_is_counted(life: list[dict[str, Any]]) -> None:
    for rank in life:
        told = rank["stale_kv"]
        assert (told["True_counted"], told["False_counted"]) == (0.0, 4.0 * rank["num_replicas"])
        assert [spans for _, _, spans, _ in told[False]] == [[("a", 0, 5), ("b", 5, 12)]] * 4
        assert [logprobs for _, logprobs, _, _ in told[True]] != [logprobs for _, logprobs, _, _ in told[False]]


def test_a_pause_while_the_engine_sleeps_holds_until_the_resume(life: list[dict[str, Any]]) -> None:
    for rank in life:
        assert rank["asleep"]["refused"].startswith("engine is ASLEEP(2): step is refused")
        assert [told[0] for told in rank["asleep"]["told"]] == [rank["whole"][0][0]]


def test_no_prompt_is_served_from_the_cache_of_other_weights(life: list[dict[str, Any]]) -> None:
    assert all(rank["cached"] == [32, 0, 0, 0] for rank in life)


def test_requests_by_hand_and_those_of_generate_do_not_mix(life: list[dict[str, Any]]) -> None:
    for rank in life:
        whole, by_hand = rank["whole"], rank["by_hand"]
        assert [told[0] for told in by_hand["generated"]] == [whole[0][0][:5]]
        assert [told[0] for told in by_hand["left"]] == [whole[0][0]]
        assert [(told[0], told[3]) for told in by_hand["aborted"]] == [(w[0][:3], "abort") for w in whole]
        assert [told[0] for told in by_hand["twice"] + by_hand["rest"]] == [w[0][:3] for w in whole]


def test_no_new_request_reads_a_prefix_of_older_weights_while_others_keep_theirs(life: list[dict[str, Any]]) -> None:
    for rank_number, rank in enumerate(life):
        saw = rank["old_prefix"]
        keeps = rank_number == 1 or rank["num_replicas"] == 1
        for logprobs in saw["seen"]:
            assert logprobs == pytest.approx(saw["fresh"], abs=1e-5)
        assert saw["cached"] == ([0, 0] if keeps else [0, 32])
        assert saw["cached_again"] == 32
