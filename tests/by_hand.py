"""An engine driven by hand, in chunks and against its states: what `tests/test_reload.py` looks at."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from colo.engine.copy_kernel import CopyTable
from colo.engine.engine import Engine
from colo.policy.model import Policy
from tests.engines import GREEDY, differing, held_by, load_by_vllm, make_requests, refusal

Whole = dict[str, Tensor]
FIRST, SECOND = "model.layers.0.", "model.layers.1."


def drive(engine: Engine, policy: Policy) -> dict[str, Any]:
    """Guards, chunks, a cancel and lost weights in turn, on an engine that sleeps; it sleeps afterwards."""
    whole = {name: tensor.clone() for name, tensor in policy.full_weights()}
    saw: dict[str, Any] = {"guards": _guards(engine, whole)}
    saw["chunks"] = _chunks(engine, policy, whole)
    saw["tampered"] = _tampered(engine, whole)
    saw["half_a_chunk"] = _half_a_chunk(engine, whole)
    saw["lost"] = _lost(engine, whole)
    saw["one_expert"] = _one_expert(engine, whole) if engine._reloader.route.packed else ""
    saw["cancelled"] = _cancelled(engine, whole)
    engine.sleep()
    return saw


def _guards(engine: Engine, whole: Whole) -> dict[str, list[str]]:
    """What is refused in each state, in the engine's words."""
    reload, generate = partial(engine.reload, whole.items(), "0"), partial(engine.generate, make_requests(0), GREEDY)
    start, chunk = engine.start_weight_update, partial(engine.update_weights, [])
    finish, cancel = partial(engine.finish_weight_update, "0"), engine.cancel_weight_update
    saw = {"asleep": _refused(reload, start, generate, chunk, finish, cancel)}
    engine.wake_up()
    saw["woken"] = _refused(generate, chunk, finish, cancel)
    engine.reload(whole.items(), "1")
    saw["ready"] = _refused(chunk, finish, cancel)
    start()
    saw["updating"] = _refused(start, reload, engine.sleep, generate, lambda: engine.wake_up(["weights"]))
    cancel()
    engine.reload(whole.items(), "1")
    engine.submit(make_requests(0)[0], GREEDY)
    saw["in flight"] = _refused(reload, start)
    engine.abort()
    engine.reload(whole.items(), "1")
    return saw


def _refused(*calls: Callable[[], Any]) -> list[str]:
    return [refusal(call) for call in calls]


def _chunks(engine: Engine, policy: Policy, whole: Whole) -> dict[str, Any]:
    """An update of some tensors, in pieces that the caller overwrites as soon as they are taken."""
    base = {name: tensor * 0.75 for name, tensor in whole.items()}
    engine.reload(base.items(), "1")
    before = held_by(engine)
    engine.start_weight_update()
    saw: dict[str, Any] = {"states": [str(engine.state)]}

    chunk = {name: tensor * 1.25 for name, tensor in whole.items() if name.startswith(FIRST)}
    mixture = base | {name: tensor.clone() for name, tensor in chunk.items()}
    engine.update_weights(chunk.items())
    for tensor in chunk.values():
        tensor.fill_(float("nan"))
    saw["first"] = differing(engine, before)

    shards = {name: shard for name, shard in policy.weights() if name.startswith(SECOND) and "norm" not in name}
    mixture |= {name: whole[name] for name in shards}
    query, fused = f"{SECOND}self_attn.q_proj.weight", f"{SECOND}self_attn.qkv_proj.weight"
    before, kept = held_by(engine), engine._parts.model.get_parameter(fused)
    engine.update_weights([(query, shards.pop(query))])
    saw["query"] = differing(engine, before)
    half = kept.shape[0] // 2  # as many query heads as key and value heads together
    saw["query_kept"] = [torch.equal(kept[rows], before[fused][rows]) for rows in (slice(half), slice(half, None))]
    before = held_by(engine)
    engine.update_weights(shards.items())
    saw["second"] = differing(engine, before)
    saw["states"].append(str(engine.state))

    engine.finish_weight_update("2")
    saw["states"].append(str(engine.state))
    saw["spans"] = {
        (span.version, span.start) for one in engine.generate(make_requests(0), GREEDY) for span in one.spans
    }
    saw["wrong"] = _wrong(engine, mixture)
    return saw


def _tampered(engine: Engine, whole: Whole) -> list[str]:
    """During an update somebody writes into a tensor that no chunk brought, on rank 1 alone."""
    engine.reload(whole.items(), "1")
    engine.start_weight_update()
    engine.update_weights([(name, tensor) for name, tensor in whole.items() if name.startswith(FIRST)])
    if engine._ranks.rank == 1:
        engine._parts.model.get_parameter("model.norm.weight").data[3] += 1
    with pytest.raises(RuntimeError) as raised:
        engine.finish_weight_update("3")
    saw = [str(raised.value), str(engine.state)]
    engine.reload(whole.items(), "repaired")
    return [*saw, str(engine.state), *_wrong(engine, whole)]


def _half_a_chunk(engine: Engine, whole: Whole) -> list[str]:
    """A chunk whose copy raises on rank 1, in an engine that proves nothing; then an update that leaves it out."""

    def fails(table: CopyTable) -> None:
        del table
        raise OSError("planted")

    reloader = engine._reloader
    options, reloader._options = reloader._options, replace(reloader._options, proof="off")
    name = f"{FIRST}self_attn.o_proj.weight"
    engine.start_weight_update()
    with pytest.MonkeyPatch.context() as patch:
        if engine._ranks.rank == 1:
            patch.setattr(CopyTable, "run", fails)
        with pytest.raises((RuntimeError, OSError)) as raised:
            engine.update_weights([(name, whole[name])])
    saw = [str(raised.value), str(engine.state)]
    engine.start_weight_update()
    saw.append(refusal(lambda: engine.finish_weight_update("4")))
    engine.cancel_weight_update()
    reloader._options = options
    return saw


def _lost(engine: Engine, whole: Whole) -> list[str]:
    """Weights that a sleep dropped, brought back in two chunks that are cut in the middle of a layer."""
    engine.sleep("2")
    engine.wake_up()
    engine.start_weight_update()
    inside = [number for number, name in enumerate(whole) if name.startswith(SECOND)]
    items, cut = list(whole.items()), inside[len(inside) // 2]
    engine.update_weights(items[:cut])
    saw = [refusal(lambda: engine.finish_weight_update("4")), str(engine.state), items[cut][0]]
    engine.update_weights(items[cut:])
    engine.finish_weight_update("4")
    return [*saw, str(engine.state), *_wrong(engine, whole)]


def _one_expert(engine: Engine, whole: Whole) -> str:
    """A part of a module whose weights vLLM packs together."""
    name = f"{SECOND}mlp.experts.0.gate_proj.weight"
    engine.reload(whole.items(), "1")
    engine.start_weight_update()
    engine.update_weights([(name, whole[name])])
    said = refusal(lambda: engine.finish_weight_update("5"))
    engine.cancel_weight_update()
    return said


def _cancelled(engine: Engine, whole: Whole) -> list[str]:
    """An update that is given up leaves no weights that count: another needs all of them."""
    engine.reload(whole.items(), "1")
    engine.start_weight_update()
    engine.update_weights([("model.norm.weight", whole["model.norm.weight"])])
    engine.cancel_weight_update()
    saw = [str(engine.state), refusal(lambda: engine.generate(make_requests(0), GREEDY))]
    engine.start_weight_update()
    saw.append(refusal(lambda: engine.finish_weight_update("6")))
    engine.cancel_weight_update()
    engine.reload(whole.items(), "7")
    return [*saw, str(engine.state), *_wrong(engine, whole)]


def _wrong(engine: Engine, whole: Whole) -> list[str]:
    """Where the engine differs from what the model's own loader makes of the same weights."""
    held = held_by(engine)
    load_by_vllm(engine, whole.items())
    return differing(engine, held)
