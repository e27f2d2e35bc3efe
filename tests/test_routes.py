"""Which way a model is reloaded, on the real vLLM CPU backend: faults are planted, and each is found by the trial.

Two ranks with an engine each; one build serves all plants, each with a `Reloader` of its own.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colo.config import ReloadConfig
from colo.engine.engine import Engine
from colo.engine.plan import engine_tensors, record_plan
from colo.engine.reload import Reloader
from colo.policy.model import Policy
from colo.policy.shard import stand_ins
from colo.ranks import Ranks
from tests.engines import differing, engine_config, greedy_logprobs, held_by, load_by_vllm
from tests.ranks import run_ranks
from tests.rollouts import as_batch, made_up_rows, policy_config

NORM = "model.norm.weight"
OUTPUT = "model.layers.0.self_attn.o_proj.weight"


class Bench:
    """A built engine and a policy that was not trained yet, to make reloaders on."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.engine = Engine(engine_config(), ranks, folder, stand_ins(folder, torch.float32))
        self.policy = Policy(policy_config(folder), ranks, folder)
        self.model = self.engine._parts.model
        self.engine.wake_up()
        self.built = self.engine._reloader
        self.as_built = {name: tensor.clone() for name, tensor in self.policy.full_weights()}
        self.said: list[str] = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.said.append(record.getMessage())
        logger = logging.getLogger("colo.engine")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)

    def restore(self) -> None:
        """Let the engine hold the folder's weights, by the plan that it was built with."""
        self.engine._reloader = self.built
        self.engine.reload(self.as_built.items(), "folder")

    def plan_anew(self, transport: str = "auto") -> Reloader:
        """A reloader as a build with the present plants would make it, for the engine to use."""
        self.said.clear()
        reloader = Reloader(
            self.engine._parts,
            self.model,
            engine_tensors(self.model),
            stand_ins(self.folder, torch.float32),
            self.folder,
            self.ranks,
            ReloadConfig(transport=transport),
        )
        self.engine._reloader = reloader
        return reloader

    @contextmanager
    def loading(self, name: str, loader: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
        """A loader of its own for a parameter."""
        parameter: Any = self.model.get_parameter(name)
        kept = parameter.__dict__.get("weight_loader")
        parameter.weight_loader = loader
        yield
        del parameter.weight_loader
        if kept is not None:
            parameter.weight_loader = kept

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """The calls on vLLM's worker."""
        calls, llm = [], self.engine._parts.llm
        plain = llm.collective_rpc

        def counted(method: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(method)
            return plain(method, *args, **kwargs)

        llm.collective_rpc = counted  # type: ignore[method-assign]
        yield calls
        del llm.collective_rpc


def _by_bracket(bench: Bench, whole: dict[str, Tensor], transport: str) -> dict[str, Any]:
    """One reload of a model with a plant, from shards, compared with vLLM's own loader."""
    bench.restore()
    scale: Any = bench.model.get_buffer("model.layers.0.self_attn.attn._k_scale")
    scale.fill_(0.375)
    reloader = bench.plan_anew(transport)
    saw: dict[str, Any] = {"problems": dict(reloader.route.by_bracket), "lost": reloader.route.lost}
    saw["said"] = [line for line in bench.said if "reload_weights" in line]
    with pytest.raises(RuntimeError) as refused:
        bench.engine.start_weight_update()
    saw["start"] = str(refused.value)
    with bench.counting() as calls:
        bench.engine.reload(bench.policy.weights(), "bracket")
    saw |= {"calls": calls, "state": str(bench.engine.state), "scale": scale.item()}
    held = held_by(bench.engine)
    load_by_vllm(bench.engine, whole.items())
    saw["wrong"] = differing(bench.engine, held)
    saw["metrics"] = bench.engine.take_metrics()
    scale.fill_(1.0)
    return saw


def _fails_in_the_bracket(bench: Bench) -> list[str]:
    """The model's loader raises on one rank after eight tensors, while vLLM reloads; the next reload is whole."""
    bench.restore()
    bench.plan_anew("gather")
    model: Any = bench.model
    plain = model.load_weights

    def fails(weights: Iterable[tuple[str, Tensor]]) -> None:
        plain(islice(weights, 8))
        raise OSError("planted")

    if bench.ranks.rank == 1:
        model.load_weights = fails
    with pytest.raises((RuntimeError, OSError)) as raised:
        bench.engine.reload(bench.policy.weights(), "2")
    said = [str(raised.value), str(bench.engine.state)]
    if bench.ranks.rank == 1:
        del model.load_weights
    bench.engine.reload(bench.policy.weights(), "3")
    return [*said, str(bench.engine.state)]


def _permuted(bench: Bench) -> dict[str, Any]:
    """A parameter that lies in another order than it was loaded in: neither way writes it rightly."""
    bench.restore()
    parameter = bench.model.get_parameter(OUTPUT).data
    parameter.copy_(parameter.flip(0).clone())
    reloader = bench.plan_anew()
    with pytest.raises(ValueError, match="model must be one") as refused:
        bench.engine.require_reloadable()
    return {"lost": reloader.route.lost, "by_bracket": reloader.route.by_bracket, "refused": str(refused.value)}


def _one_element(bench: Bench) -> list[dict[str, Any]]:
    """vLLM's default loader fills a parameter of one element with a number that it reads."""
    norm = bench.model.get_submodule("model.norm")
    norm.register_parameter("scale", nn.Parameter(torch.ones(1), requires_grad=False))
    plans = []
    for shape in ((1,), ()):
        handed = [*stand_ins(bench.folder, torch.float32), ("model.norm.scale", torch.empty(shape, device="meta"))]
        plan = record_plan(bench.model, engine_tensors(bench.model), handed, torch.float32)
        copied = [copy.source for copy in plan.copies if copy.target == "model.norm.scale"]
        plans.append({"problems": plan.problems, "copied": copied, "fills": [fill.target for fill in plan.fills]})
    del norm.scale
    return plans


def _routes(ranks: Ranks, folder: Path) -> dict[str, Any]:
    bench = Bench(ranks, folder)
    saw: dict[str, Any] = {"built": bench.built.route.by_bracket, "permuted": _permuted(bench)}
    saw["one_element"] = _one_element(bench)
    rows = made_up_rows(4)[ranks.rank :: ranks.world_size]
    bench.policy.update(as_batch([[row] for row in rows]))
    whole = {name: tensor.clone() for name, tensor in bench.policy.full_weights()}

    def computes(parameter: Tensor, loaded: Tensor) -> None:
        parameter.data.copy_(loaded * 1.0)

    def reads(parameter: Tensor, loaded: Tensor) -> None:
        if loaded.sum().item() != 0:
            parameter.data.copy_(loaded)

    with bench.loading(NORM, computes):
        saw["peer"] = _by_bracket(bench, whole, "peer")
        saw["gather"] = _by_bracket(bench, whole, "gather")
        saw["failed"] = _fails_in_the_bracket(bench)
        saw["logprobs"] = [greedy_logprobs(bench.engine)]
    with bench.loading(NORM, reads):
        saw["reads"] = _by_bracket(bench, whole, "gather")
    bench.restore()
    bench.engine.reload(bench.policy.weights(), "plan")
    saw["logprobs"].append(greedy_logprobs(bench.engine))
    bench.engine.close()
    return saw


@pytest.fixture(
    scope="module",
    params=[("qwen2", 1), *(pytest.param(case, marks=pytest.mark.slow) for case in [("qwen3_moe", 1), ("llama", 2)])],
    ids=str,
)
def routes(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> list[dict[str, Any]]:
    """What each rank saw."""
    family, size = request.param
    return run_ranks(_routes, tiny_models[family], tensor_parallel_size=size)


def test_a_loader_that_computes_takes_vllms_own_reload_and_is_right(routes: list[dict[str, Any]]) -> None:
    for rank in routes:
        assert rank["built"] == {}, "without a plant there is nothing to say"
        for transport in ("peer", "gather"):
            saw = rank[transport]
            assert saw["problems"] == {NORM: "computed by aten.mul.Tensor"}
            assert saw["lost"] == []
            assert saw["said"] == [f"each reload takes vLLM's own reload_weights: {NORM}: computed by aten.mul.Tensor"]
            assert saw["calls"] == ["reload_weights"], "once a reload"
            assert saw["wrong"] == []
            assert saw["state"] == "READY(bracket)"
            assert saw["scale"] == 0.375, "vLLM's reload sets scales back; colo keeps them"
        assert rank["logprobs"][0] == rank["logprobs"][1]


def test_a_loader_that_reads_a_value_takes_vllms_own_reload_for_every_parameter(routes: list[dict[str, Any]]) -> None:
    for rank in routes:
        saw = rank["reads"]
        assert list(saw["problems"]) == [""]
        (said,) = saw["said"]
        assert said.startswith(
            "each reload takes vLLM's own reload_weights: every parameter: its loader does more than"
        )
        assert (saw["calls"], saw["wrong"], saw["scale"]) == (["reload_weights"], [], 0.375)


def test_a_model_of_that_kind_is_refused_in_chunks(routes: list[dict[str, Any]]) -> None:
    for rank in routes:
        assert rank["peer"]["start"] == (
            f"this model is reloaded whole, not in chunks: {NORM} cannot be written in place"
        )
        assert rank["reads"]["start"] == (
            "this model is reloaded whole, not in chunks: every parameter cannot be written in place"
        )


def test_vllms_reload_that_fails_on_one_rank_fails_on_all_and_the_next_one_mends_it(
    routes: list[dict[str, Any]],
) -> None:
    stale = "STALE(a reload did not finish)"
    assert routes[0]["failed"] == ["reload failed on rank 1: OSError: planted", stale, "READY(3)"]
    assert routes[1]["failed"] == ["planted", stale, "READY(3)"]


def test_a_parameter_that_no_way_writes_rightly_is_refused_by_name(routes: list[dict[str, Any]]) -> None:
    for rank in routes:
        saw = rank["permuted"]
        assert saw["lost"] == [OUTPUT]
        assert saw["by_bracket"] == {OUTPUT: "laid out anew by vLLM after it loads"}
        assert saw["refused"] == (
            f"model must be one that can be reloaded, got one where its own tensors, loaded again, change {OUTPUT}"
        )


def test_vllms_fill_of_one_element_is_a_copy(routes: list[dict[str, Any]]) -> None:
    for rank in routes:
        for plan in rank["one_element"]:
            assert plan["problems"] == {}
            assert plan["copied"] == ["model.norm.scale"]
            assert "model.norm.scale" not in plan["fills"]
