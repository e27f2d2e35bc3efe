"""Drafts on the real vLLM CPU backend: kept over a level-2 sleep, and seen when they are lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from colo.config import EngineConfig
from colo.engine.drafts import AcceptanceFloor, DraftCounts, DraftWatch, kept_parameters, kept_patterns, sum_counts
from colo.engine.engine import Engine
from colo.ranks import Ranks
from colo.types import Sampling
from tests.engines import CPU_OPTIONS, GREEDY, SAMPLING, engine_config, gap_to_transformers, make_requests
from tests.ranks import run_ranks

KEPT = ["model.norm.weight"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def _engine(ranks: Ranks, folder: Path, speculative: dict[str, Any], kept: list[str] | None = None) -> Engine:
    options = CPU_OPTIONS | ({"sleep_preserve_parameter_names": kept} if kept else {})
    stand_ins = [(name, tensor.to("meta")) for name, tensor in _weights(folder, kept).items()]
    return Engine(engine_config(vllm=options, speculative=speculative), ranks, folder, stand_ins)


def _weights(folder: Path, kept: list[str] | None = None) -> dict[str, torch.Tensor]:
    """What the policy hands over: all but what a sleep keeps."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name not in (kept or [])}


def _phase(engine: Engine, weights: dict[str, torch.Tensor], *, noise: float = 0.0) -> tuple[Any, dict[str, float]]:
    """One awake phase: its tokens and what the engine says of its drafts; with noise, which nothing was told of."""
    with engine.awake(weights.items(), "0"):
        if noise:
            _add_noise(engine._parts.draft, noise)
        tokens = [completion.token_ids for completion in engine.generate(make_requests(0, max_new_tokens=32), GREEDY)]
    metrics = engine.take_metrics()
    return tokens, {name: value for name, value in metrics.items() if name.startswith("draft/")}


def _step_by_step(engine: Engine, weights: dict[str, torch.Tensor], *samplings: Sampling) -> dict[str, float]:
    """One awake phase as carry-over has it, by single steps: what the engine says of its drafts.

    Of several samplings each has its requests in flight beside those of the others.
    """
    with engine.awake(weights.items(), "0"):
        for number, sampling in enumerate(samplings):
            for request in make_requests(number, max_new_tokens=32):
                engine.submit(request, sampling)
        while engine._requests:
            engine.step()
        engine.finished()
    return {name: value for name, value in engine.take_metrics().items() if name.startswith("draft/")}


def _add_noise(draft: nn.Module | None, scale: float) -> None:
    assert draft is not None
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def _bytes_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def _is_same(module: nn.Module, held: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(parameter, held[name]) for name, parameter in module.named_parameters())


def _life_with_a_draft(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The target's own weights as its draft, through cycles at level 2; then noise in the draft."""
    speculative = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    engine = _engine(ranks, folder, speculative, kept=KEPT)
    parts = engine._parts
    assert parts.draft is not None
    assert parts.cpu_sleep is not None
    weights = _weights(folder, KEPT)
    built = _bytes_of(parts.draft)  # asleep since the build: readable, since they were kept
    saw: dict[str, Any] = {
        "built_is_folder": torch.equal(
            built["model.layers.0.mlp.down_proj.weight"], weights["model.layers.0.mlp.down_proj.weight"]
        ),
        "kept": sorted(parts.kept),
        "draft_names": sorted(built),
        "freed": parts.cpu_sleep.freed_bytes,
    }
    engine.wake_up(["weights"])
    saw["woken_nan"] = [name for name, p in parts.model.named_parameters() if bool(p.isnan().any())]
    saw["not_nan"] = [name for name, p in parts.model.named_parameters() if not bool(p.isnan().any())]
    engine.sleep()

    phases = [_phase(engine, weights) for _ in range(3)]
    saw["metrics"] = [metrics for _, metrics in phases]
    saw["greedy"] = [tokens for tokens, _ in phases]
    saw["draft_kept"] = _is_same(parts.draft, built)
    ways = [(GREEDY,), (SAMPLING,), (SAMPLING, GREEDY), (GREEDY,)]
    saw["step_by_step"] = [_step_by_step(engine, weights, *samplings) for samplings in ways]
    saw |= _sample(engine, ranks, folder, weights)
    saw["trained"] = _train_the_draft(engine, folder, weights, built)
    saw["lost"] = _lose_the_draft(engine, weights, built)
    engine.close()
    return saw


def _sample(engine: Engine, ranks: Ranks, folder: Path, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Seeded sampling twice, by hand: a watch of its own, since its drafts are accepted at another rate."""
    watch = DraftWatch(engine._parts.llm, 0.5, has_weights=False)
    sampled, metrics = [], {}
    for _ in range(2):
        engine.wake_up()
        engine.reload(weights.items(), "0")
        watch.start()
        sampled.append(engine.generate(make_requests(0, max_new_tokens=32), SAMPLING))
        metrics = watch.finish(ranks)
        engine.sleep()
    return {
        "sampled": [[completion.token_ids for completion in completions] for completions in sampled],
        "sampled_metrics": metrics,
        "gap": gap_to_transformers(folder, load_file(folder / "model.safetensors"), sampled[0]),
    }


def _train_the_draft(
    engine: Engine, folder: Path, weights: dict[str, torch.Tensor], built: dict[str, torch.Tensor]
) -> dict[str, bool]:
    """A draft that comes with the policy's weights; then a cycle without it; then the first one again."""
    draft, first = engine._parts.draft, load_file(folder / "model.safetensors")
    assert draft is not None
    trained = {name: tensor * 1.25 for name, tensor in first.items()}
    with engine.awake(weights.items(), "0", draft_weights=trained.items()):
        held = _bytes_of(draft)
    with torch.no_grad():
        draft.load_weights(trained.items())  # type: ignore[operator]
    is_loaded = _is_same(draft, held)
    with engine.awake(weights.items(), "0"):
        is_kept = _is_same(draft, held)
    with pytest.raises(ValueError, match="weights must be the tensors that the engine was built for, got no "):
        engine._draft.reload(list(trained.items())[:3])
    with engine.awake(weights.items(), "0", draft_weights=first.items()):
        pass
    return {"is_loaded": is_loaded, "is_kept": is_kept, "is_back": _is_same(draft, built)}


def _lose_the_draft(engine: Engine, weights: dict[str, torch.Tensor], built: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A little noise in the draft; a reload over it; and so much noise that nothing is right."""
    draft = engine._parts.draft
    assert draft is not None
    tokens, metrics = _phase(engine, weights, noise=0.04)
    with pytest.raises(RuntimeError) as changed:
        _phase(engine, weights)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            parameter.copy_(built[name])
    with pytest.raises(RuntimeError) as useless:
        _phase(engine, weights, noise=1.0)
    return {"tokens": tokens, "metrics": metrics, "changed": str(changed.value), "useless": str(useless.value)}


def _life_with_ngram(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Drafts without weights; and buffers that no reload writes, set by hand, over a cycle at level 2."""
    engine = _engine(ranks, folder, NGRAM)
    weights = _weights(folder)
    phases = [_phase(engine, weights) for _ in range(2)]
    parts = engine._parts
    attention = next(module for module in parts.model.modules() if hasattr(module, "_k_scale"))

    def calibrate(worker: Any) -> None:
        attention.get_buffer("_k_scale").fill_(0.5)
        attention.get_buffer("_v_scale").fill_(0.75)

    engine.wake_up()
    engine.reload(weights.items(), "0")
    engine.collective_rpc(calibrate)
    engine.sleep()
    _phase(engine, weights)
    by_engine = [attention.get_buffer(name).item() for name in ("_k_scale", "_v_scale")]
    engine.wake_up()
    attention.get_buffer("_k_scale").fill_(0.125)
    attention.get_buffer("_v_scale").fill_(0.25)
    parts.model.register_buffer("router_bias", torch.arange(8.0))
    parts.sleep("2")
    parts.wake("weights")
    parts.wake("kv_cache")
    saw = {
        "has_draft": engine._parts.draft is not None,
        "kept": list(engine._parts.kept),
        "metrics": [metrics for _, metrics in phases],
        "greedy": phases[-1][0],
        "scales_by_engine": by_engine,
        "scales": [attention.get_buffer(name).item() for name in ("_k_scale", "_v_scale")],
        "bias": parts.model.get_buffer("router_bias").tolist(),
    }
    engine.close()
    return saw


@pytest.fixture(scope="module")
def life(tiny_models: dict[str, Path]) -> list[dict[str, Any]]:
    """What each of two ranks saw, each with an engine of its own."""
    return run_ranks(_life_with_a_draft, tiny_models["qwen3"])


@pytest.fixture(scope="module")
def ngram_life(tiny_models: dict[str, Path]) -> dict[str, Any]:
    """What one rank saw of an engine whose drafts are looked up."""
    return run_ranks(_life_with_ngram, tiny_models["qwen3"], world_size=1)[0]


def test_a_draft_is_kept_over_level_2_and_the_target_is_not(life: list[dict[str, Any]]) -> None:
    for rank in life:
        assert rank["built_is_folder"]
        assert rank["kept"] == sorted([*(f"draft.{name}" for name in rank["draft_names"]), *KEPT])
        assert rank["draft_kept"]
        assert rank["freed"] > 32 << 20
        assert rank["not_nan"] == KEPT
        assert len(rank["woken_nan"]) > 10


def test_a_draft_of_the_targets_own_weights_is_accepted_in_every_phase(life: list[dict[str, Any]]) -> None:
    for rank in life:
        for metrics in rank["metrics"]:
            assert metrics["draft/acceptance"] > 0.9
            assert metrics["draft/mean_length"] > 3.5
            assert metrics["draft/num_draft_tokens"] > 2 * 4 * 16  # of both replicas
            assert all(metrics[f"draft/acceptance_pos_{position}"] > 0.85 for position in range(3))
            assert metrics["draft/alarm"] == 0
        assert rank["greedy"][0] == rank["greedy"][1] == rank["greedy"][2]
        assert rank["metrics"] == life[0]["metrics"]


def test_tokens_sampled_through_a_draft_are_the_policys(life: list[dict[str, Any]]) -> None:
    for rank in life:
        assert rank["gap"] < 1e-4
        assert rank["sampled"][0] == rank["sampled"][1]
        assert rank["sampled"][0][0] != rank["sampled"][0][1]  # by their seeds
        assert rank["sampled_metrics"]["draft/num_draft_tokens"] > 64


def test_acceptance_is_held_against_that_of_the_same_way_to_sample_also_step_by_step(
    life: list[dict[str, Any]],
) -> None:
    for rank in life:
        greedy, sampled, both, greedy_again = rank["step_by_step"]
        assert greedy["draft/acceptance"] > 0.9
        assert sampled["draft/acceptance"] < 0.5 * greedy["draft/acceptance"], "an alarm, were it held against greedy"
        assert sampled["draft/acceptance"] < both["draft/acceptance"] < greedy["draft/acceptance"]
        assert greedy_again["draft/acceptance"] == pytest.approx(greedy["draft/acceptance"])
        assert [metrics["draft/alarm"] for metrics in rank["step_by_step"]] == [0.0] * 4


def test_a_draft_that_is_trained_is_reloaded_through_a_plan_of_its_own(life: list[dict[str, Any]]) -> None:
    assert all(rank["trained"] == {"is_loaded": True, "is_kept": True, "is_back": True} for rank in life)


def test_a_lost_draft_changes_no_token_and_is_seen(life: list[dict[str, Any]]) -> None:
    for rank in life:
        lost = rank["lost"]
        assert lost["tokens"] == rank["greedy"][0]
        assert lost["metrics"]["draft/acceptance"] < 0.2
        assert lost["metrics"]["draft/alarm"] == 1
        assert "the draft's weights are not those that were kept: " in lost["changed"]
        assert lost["useless"].startswith("drafts: none of ")


def test_ngram_runs_through_and_is_counted(ngram_life: dict[str, Any], life: list[dict[str, Any]]) -> None:
    assert not ngram_life["has_draft"]
    assert ngram_life["kept"] == []
    assert ngram_life["metrics"][0] == ngram_life["metrics"][1]
    assert ngram_life["metrics"][0]["draft/num_draft_tokens"] > 0
    assert 0 <= ngram_life["metrics"][0]["draft/acceptance"] <= 1
    assert ngram_life["greedy"] == life[0]["greedy"][0]


def test_calibrated_scales_and_other_buffers_survive_level_2(ngram_life: dict[str, Any]) -> None:
    assert ngram_life["scales_by_engine"] == [0.5, 0.75]
    assert ngram_life["scales"] == [0.125, 0.25]
    assert ngram_life["bias"] == list(range(8))


COUNTS = DraftCounts(
    num_drafts=100, num_draft_tokens=300, num_accepted_tokens=180, num_accepted_by_position=(80, 60, 40)
)


def test_metrics_are_shares_of_what_was_counted_since() -> None:
    doubled = sum_counts([COUNTS, COUNTS])
    assert doubled.since(COUNTS) == COUNTS
    assert COUNTS.since(DraftCounts()) == COUNTS
    assert COUNTS.metrics() == {
        "draft/acceptance": 0.6,
        "draft/num_draft_tokens": 300.0,
        "draft/mean_length": 2.8,
        "draft/acceptance_pos_0": 0.8,
        "draft/acceptance_pos_1": 0.6,
        "draft/acceptance_pos_2": 0.4,
    }
    assert doubled.metrics() == COUNTS.metrics() | {"draft/num_draft_tokens": 600.0}
    assert COUNTS.since(COUNTS).metrics() == {"draft/num_draft_tokens": 0.0}


def _with(num_accepted: int, num_draft_tokens: int = 300) -> DraftCounts:
    return replace(COUNTS, num_accepted_tokens=num_accepted, num_draft_tokens=num_draft_tokens)


def test_an_acceptance_below_its_floor_is_an_alarm_and_stays_one() -> None:
    floor = AcceptanceFloor(0.5, has_weights=True)
    assert floor.judge(_with(180)) == ""
    assert floor.mean == 0.6
    assert floor.judge(_with(120)) == ""
    assert floor.mean == pytest.approx(0.8 * 0.6 + 0.2 * 0.4)
    for _ in range(20):
        wrong = floor.judge(_with(30))
        assert wrong.startswith("drafts: acceptance 0.100 is below engine.draft_floor 0.5 x its running mean 0.560: ")
    assert floor.judge(_with(90)) == ""  # 0.3 is above half of 0.56
    assert floor.mean == pytest.approx(0.8 * 0.56 + 0.2 * 0.3)


def test_none_accepted_is_an_error_where_some_would_have_been() -> None:
    floor = AcceptanceFloor(0.5, has_weights=True)
    assert floor.judge(_with(180)) == ""
    assert floor.judge(_with(0, num_draft_tokens=20)) == ""  # too few to say, but they add up
    with pytest.raises(RuntimeError, match=r"^drafts: none of 64 draft tokens was accepted: "):
        floor.judge(_with(0, num_draft_tokens=44))
    seldom = AcceptanceFloor(0.5, has_weights=True)
    assert seldom.judge(_with(2, num_draft_tokens=500)) == ""  # nearly even odds over the whole vocabulary
    assert seldom.judge(_with(0, num_draft_tokens=500)) == ""
    assert seldom.judge(_with(1, num_draft_tokens=500)) == ""
    never = AcceptanceFloor(0.5, has_weights=True)
    assert never.judge(_with(0, num_draft_tokens=1023)) == ""
    with pytest.raises(RuntimeError, match=r"^drafts: none of 1024 draft tokens was accepted: "):
        never.judge(_with(0, num_draft_tokens=1))


def test_a_draft_without_weights_may_have_nothing_accepted() -> None:
    floor = AcceptanceFloor(0.5, has_weights=False)
    assert floor.judge(_with(0, num_draft_tokens=5000)) == ""
    assert floor.judge(_with(90)) == ""
    assert floor.judge(_with(0)).endswith("the completions repeat less of what came before")


def test_kept_parameters_are_matched_by_vllms_names() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "norm": nn.LayerNorm(2)})
    draft = nn.ModuleDict({"embed": model["embed"], "layer": nn.Linear(2, 2)})
    off, on = EngineConfig(), EngineConfig(speculative=NGRAM)
    assert kept_patterns(off) == []
    assert kept_patterns(on) == ["draft.*"]
    assert list(kept_parameters(model, draft, ["draft.*"])) == ["draft.layer.weight", "draft.layer.bias"]
    assert kept_parameters(model, None, ["draft.*"]) == {}
    kept = kept_parameters(model, draft, ["norm.*", "draft.layer.b*"])
    assert list(kept) == ["norm.weight", "norm.bias", "draft.layer.bias"]
    assert kept["norm.weight"] is model["norm"].weight
    with pytest.raises(ValueError, match=r"^engine\.vllm\.sleep_preserve_parameter_names must match .* got 'nrm\.\*'"):
        kept_parameters(model, draft, ["nrm.*"])
