"""Reloads that go wrong, on the real vLLM CPU backend: two ranks, an engine each, one policy sharded over both.

A fault is planted on rank 1 alone. One build serves all of them, and after each the next whole reload mends it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import colo.ranks
from colo.config import ReloadConfig
from colo.engine.engine import Engine
from colo.engine.plan import engine_tensors
from colo.policy.model import Policy
from colo.policy.shard import stand_ins
from colo.ranks import Ranks
from colo.types import NamedTensors, TensorShard
from tests.engines import GREEDY, differing, engine_config, held_by, load_by_vllm, make_requests, refusal
from tests.ranks import run_ranks
from tests.rollouts import policy_config

Handed = dict[str, TensorShard]
OUTPUT = "model.layers.1.self_attn.o_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"
SCALE = "model.layers.0.self_attn.attn._k_scale"
CACHE = "model.layers.0.self_attn.rotary_emb.cos_sin_cache"
REPAIRED = ["READY(repaired)", []]
OTHERS = "the engine does not hold what the policy handed over: "


class Bench:
    """An engine and its policy, and what they say when a reload goes wrong."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        colo.ranks.GIVE_WAY_S = 0.0  # no process ends here
        self.ranks = ranks
        config = engine_config(reload=ReloadConfig(transport="peer"))
        self.engine = Engine(config, ranks, folder, stand_ins(folder, torch.float32))
        self.policy = Policy(policy_config(folder), ranks, folder)
        self.tensors = engine_tensors(self.engine._parts.model)
        self.engine.wake_up()
        self.engine.reload(self.policy.weights(), "0")
        self.is_planted = ranks.rank == 1

    @property
    def reloader(self) -> Any:
        return self.engine._reloader

    def handed(self) -> Handed:
        return dict(self.policy.weights())

    def whole(self, handed: Handed) -> dict[str, Tensor]:
        """What the shards of all ranks are together."""
        told = self.ranks.gather({name: (one.start, one.local.clone()) for name, one in handed.items()}, "test")
        made = {}
        for name, one in handed.items():
            flat = torch.full((torch.Size(one.shape).numel(),), float("nan"))
            for rank in told:
                start, local = rank[name]
                flat[start : start + local.numel()] = local.reshape(-1)
            made[name] = flat.reshape(one.shape)
        return made

    def wrong(self, handed: Handed) -> list[str]:
        """Where the engine differs from what vLLM's own loader makes of the same weights."""
        held = held_by(self.engine)
        load_by_vllm(self.engine, self.whole(handed).items())
        return differing(self.engine, held)

    def fail(self, weights: NamedTensors) -> dict[str, Any]:
        """A reload that is expected to raise, and what it left."""
        with pytest.raises((RuntimeError, ValueError, OSError)) as raised:
            self.engine.reload(weights, "bad")
        return {
            "kind": raised.type.__name__,
            "said": str(raised.value),
            "state": str(self.engine.state),
            "generate": refusal(lambda: self.engine.generate(make_requests(0), GREEDY)),
        }

    def repair(self) -> list[Any]:
        """The next whole reload: the state that it leads to, and what is wrong after it."""
        self.engine.reload(self.policy.weights(), "repaired")
        return [str(self.engine.state), self.wrong(self.handed())]

    @contextmanager
    def after(self, owner: Any, method: str, plant: Callable[[], None]) -> Iterator[None]:
        """On rank 1, do something right after each call of a method."""
        plain = getattr(owner, method)

        def planted(*args: Any) -> None:
            plain(*args)
            plant()

        if self.is_planted:
            setattr(owner, method, planted)
        yield
        if self.is_planted:
            delattr(owner, method)

    def failed_after(self, owner: Any, method: str, plant: Callable[[], None]) -> dict[str, Any]:
        """A reload with a plant, and the next one without."""
        with self.after(owner, method, plant):
            saw = self.fail(self.policy.weights())
        return saw | {"repaired": self.repair()}


def _engine_faults(bench: Bench) -> dict[str, Any]:
    """What lies in an engine is changed after the copy."""
    tensors, replay = bench.tensors, bench.reloader._replay

    def flip() -> None:
        tensors[OUTPUT].view(torch.int32).view(-1)[7] ^= 1

    def swap() -> None:
        tensors[EMBEDDING][[3, 5]] = tensors[EMBEDDING][[5, 3]]

    def pad() -> None:
        tensors[EMBEDDING][-1, -1] = 1e-30

    saw = {"flipped bit": bench.failed_after(replay, "copy", flip)}
    saw["swapped rows"] = bench.failed_after(bench.reloader._replay, "copy", swap)
    saw["padding"] = bench.failed_after(bench.reloader.plan, "write_fills", pad)
    for name in (SCALE, CACHE):
        before = tensors[name].clone()
        if bench.is_planted:
            tensors[name].mul_(2)
        failed = bench.fail(bench.policy.weights())
        again = bench.fail(bench.policy.weights())["said"]  # no reload brings what is kept
        tensors[name].copy_(before)
        saw[name] = failed | {"again": again, "repaired": bench.repair()}
    return saw


def _stale_pointer(bench: Bench) -> dict[str, Any]:
    """A tensor of rank 1 is new, in a storage of its own, and nobody looks where it lies."""
    handed = bench.handed()
    if bench.is_planted:
        old = handed[OUTPUT]
        handed[OUTPUT] = TensorShard(shape=old.shape, start=old.start, local=old.local + 1)
    bench.reloader._shards.refresh = lambda handed: False
    saw = bench.fail(handed.items())
    del bench.reloader._shards.refresh
    return saw | {"repaired": bench.repair()}


def _snapshot(bench: Bench) -> dict[str, Any]:
    """Rank 1 reads a copy of rank 0's shard, which rank 0 then trains in place."""
    shards = bench.reloader._shards
    plain = shards.local_of

    def local_of(rank: int, name: str) -> Tensor:
        return plain(rank, name).clone() if (rank, name) == (0, UP) else plain(rank, name)

    if bench.is_planted:
        shards.local_of = local_of
    bench.engine.drop_policy_views()
    bench.engine.reload(bench.policy.weights(), "still equal")
    for shard in bench.handed().values():
        shard.local.mul_(1.5)
    saw = bench.fail(bench.policy.weights())
    if bench.is_planted:
        del shards.local_of
    return saw | {"repaired": bench.repair()}


def _proof_modes(bench: Bench) -> list[str]:
    """The states that a flipped bit leads to: not looked for, looked for until once it was not there, and no more."""

    def flip() -> None:
        bench.tensors[OUTPUT].view(torch.int32).view(-1)[7] ^= 1

    saw, reloader = [], bench.reloader
    for proof in ("off", "first"):
        reloader._options, reloader._is_proven_once = ReloadConfig(transport="peer", proof=proof), False
        with bench.after(reloader._replay, "copy", flip):
            if proof == "first":
                saw.append(bench.fail(bench.policy.weights())["state"])
            else:
                bench.engine.reload(bench.policy.weights(), "unseen")
                saw.append(str(bench.engine.state))
        if proof == "first":
            bench.engine.reload(bench.policy.weights(), "seen")
            with bench.after(reloader._replay, "copy", flip):
                bench.engine.reload(bench.policy.weights(), "unseen")
                saw.append(str(bench.engine.state))
    reloader._options = ReloadConfig(transport="peer")
    bench.engine.reload(bench.policy.weights(), "every")
    return saw


def _failing_ranks(bench: Bench) -> dict[str, Any]:
    """Rank 1 raises: in its copy, and while its weights are taken."""

    def fails() -> None:
        raise OSError("planted")

    def breaks_off() -> Iterator[tuple[str, TensorShard]]:
        for number, item in enumerate(bench.policy.weights()):
            if bench.is_planted and number == 5:
                raise OSError("planted")
            yield item

    saw = {"copy": bench.failed_after(bench.reloader._replay, "copy", fails)}
    saw["weights"] = bench.fail(breaks_off()) | {"repaired": bench.repair()}
    return saw


def _wrong_tensors(bench: Bench) -> dict[str, Any]:
    """What is handed over is not what the engine was built for, on each rank and on rank 1 alone."""
    good = bench.handed()
    norm = good["model.norm.weight"]
    longer = TensorShard(shape=(65,), start=norm.start, local=norm.local)
    half = TensorShard(shape=norm.shape, start=norm.start, local=norm.local.half())
    cases = {
        "missing": {name: one for name, one in good.items() if name not in (OUTPUT, UP)},
        "unknown": good | {"model.extra": norm},
        "shape": good | {"model.norm.weight": longer},
        "dtype": good | {"model.norm.weight": half},
    }
    saw = {name: bench.fail(handed.items()) for name, handed in cases.items()}
    for name, handed in cases.items():
        saw[f"{name} on rank 1"] = bench.fail((handed if bench.is_planted else good).items())
    shuffled = dict(reversed(good.items())) if bench.is_planted else good
    saw["order on rank 1"] = bench.fail(shuffled.items()) | {"repaired": bench.repair()}
    return saw


def _moved(bench: Bench) -> list[Any]:
    """Rank 1 hands over new tensors in new storages: no fault, and both engines must have them."""
    handed = bench.handed()
    if bench.is_planted:
        for name, old in handed.items():
            handed[name] = TensorShard(shape=old.shape, start=old.start, local=old.local.clone() - 0.25)
    bench.engine.reload(handed.items(), "moved")
    return [str(bench.engine.state), bench.wrong(handed), bench.repair()]


def _faults(ranks: Ranks, folder: Path) -> dict[str, Any]:
    bench = Bench(ranks, folder)
    saw: dict[str, Any] = {"engine": _engine_faults(bench)}
    saw["policy"] = {"stale": _stale_pointer(bench), "snapshot": _snapshot(bench)}
    saw["failing"], saw["tensors"], saw["moved"] = _failing_ranks(bench), _wrong_tensors(bench), _moved(bench)
    saw["modes"] = _proof_modes(bench)
    bench.engine.close()
    return saw


@pytest.fixture(scope="module")
def faults(tiny_models: dict[str, Path]) -> list[dict[str, Any]]:
    """What each rank saw."""
    return run_ranks(_faults, tiny_models["llama"])


def _check(faults: list[dict[str, Any]], area: str, fault: str, said: list[str], kind: list[str]) -> None:
    """What each rank said, and that it was STALE, did not generate, and was right after the next whole reload."""
    for rank, saw in enumerate(rank[area][fault] for rank in faults):
        assert (saw["kind"], saw["said"]) == (kind[rank], said[rank])
        assert saw["state"] == "STALE(a reload did not finish)"
        assert saw["generate"].startswith("engine is STALE(a reload did not finish): generate is refused")
        assert saw.get("repaired", REPAIRED) == REPAIRED


@pytest.mark.parametrize(
    ("area", "fault", "region"),
    [
        ("engine", "flipped bit", f"{OUTPUT} (from {OUTPUT})"),
        ("engine", "swapped rows", f"{EMBEDDING} (from {EMBEDDING})"),
        ("engine", "padding", f"{EMBEDDING} (filled with 0)"),
        ("engine", SCALE, f"{SCALE} (kept)"),
        ("engine", CACHE, f"{CACHE} (kept)"),
        ("policy", "snapshot", f"model.layers.0.mlp.gate_up_proj.weight (from {UP})"),
    ],
)
def test_what_is_wrong_in_one_engine_is_named_on_every_rank(
    faults: list[dict[str, Any]], area: str, fault: str, region: str
) -> None:
    told = f"proving the reload failed on rank 1: RuntimeError: {OTHERS}{region}"
    _check(faults, area, fault, [told, OTHERS + region], ["RuntimeError"] * 2)


def test_a_stale_pointer_is_found_by_each_engine_that_read_through_it(faults: list[dict[str, Any]]) -> None:
    _check(faults, "policy", "stale", [f"{OTHERS}{OUTPUT} (from {OUTPUT})"] * 2, ["RuntimeError"] * 2)


def test_what_no_reload_brings_stays_wrong_until_it_is_put_back(faults: list[dict[str, Any]]) -> None:
    for name in (SCALE, CACHE):
        assert faults[1]["engine"][name]["again"] == f"{OTHERS}{name} (kept)"


def test_tensors_in_new_storages_are_found_on_every_rank(faults: list[dict[str, Any]]) -> None:
    assert [rank["moved"] for rank in faults] == [["READY(moved)", [], REPAIRED]] * 2


@pytest.mark.parametrize(("fault", "what"), [("copy", "reload"), ("weights", "taking the policy's tensors")])
def test_a_rank_that_raises_makes_every_rank_raise_and_name_it(
    faults: list[dict[str, Any]], fault: str, what: str
) -> None:
    said = [f"{what} failed on rank 1: OSError: planted", "planted"]
    _check(faults, "failing", fault, said, ["RuntimeError", "OSError"])


@pytest.mark.parametrize(
    ("fault", "got"),
    [
        ("missing", f"no {UP}, no {OUTPUT}"),
        ("unknown", "model.extra, which is none of them"),
        ("shape", "model.norm.weight [65] float32 instead of [64] float32"),
        ("dtype", "model.norm.weight [64] float16 instead of [64] float32"),
    ],
)
@pytest.mark.parametrize("where", ["", " on rank 1"])
def test_tensors_that_the_engine_was_not_built_for_are_named_on_every_rank(
    faults: list[dict[str, Any]], fault: str, got: str, where: str
) -> None:
    said = f"weights must be the tensors that the engine was built for, got {got}"
    _check(faults, "tensors", fault + where, [said] * 2, ["ValueError"] * 2)


def test_another_order_on_one_rank_is_refused_on_every_rank(faults: list[dict[str, Any]]) -> None:
    said = (
        "names of the policy's tensors must be the same in one order on every rank, got model.embed_tokens.weight on "
        "rank 0 and lm_head.weight on rank 1 (21 and 21 names)"
    )
    _check(faults, "tensors", "order on rank 1", [said] * 2, ["ValueError"] * 2)


def test_a_proof_looks_as_often_as_the_recipe_says(faults: list[dict[str, Any]]) -> None:
    for rank in faults:
        assert rank["modes"] == ["READY(unseen)", "STALE(a reload did not finish)", "READY(unseen)"]
