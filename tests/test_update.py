"""The update: the same step however it is cut up, and what stops it."""

import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from colo.config import GapConfig, UpdateConfig
from colo.policy.model import Policy
from colo.policy.optimizer import learning_rate
from colo.ranks import Ranks
from colo.types import Batch, MicroBatch
from tests.ranks import run_ranks
from tests.rollouts import as_batch, made_up_rows, policy_config

NUM_ROWS = 7
ON_RANK_0 = 0
"""Instead of rows per micro-batch: rank 0 has every row, each alone, and the others have none."""
CORRECTED = {
    "off": {},
    "token_mask": {"correction_low": 0.5, "correction_high": 2.0},
    "sequence_truncate": {"correction_high": 1.2},
    "sequence_mask": {"correction_low": 0.5, "correction_high": 3.0},
    "geometric_mask": {"correction_low": 0.8, "correction_high": 1.25},
}
"""Corrections beside the default, with limits that some completions of these rows meet and some do not."""
Result = tuple[dict[str, Tensor], list[dict[str, float]]]
"""Weights after the last update, and each update's metrics."""


def _weights(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.full_weights()}


def _addresses(policy: Policy) -> list[int]:
    return [shard.local.data_ptr() for _, shard in policy.weights()]


def _updated(ranks: Ranks, folder: Path, batches: list[Batch], **sections: Any) -> Result:
    policy = Policy(policy_config(folder, **sections), ranks, folder)
    places = _addresses(policy)
    metrics = [policy.update(batch) for batch in batches]
    assert _addresses(policy) == places, "an update must leave the shards where they are"
    for of_update in metrics:
        assert of_update.pop("time_s/update") > 0  # what no two updates share
    return _weights(policy), metrics


def _farthest(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name].float() - theirs[name].float()).abs().max().item() for name in ours)


def _share(ranks: Ranks, rows: list[MicroBatch], rows_per_micro_batch: int) -> list[list[MicroBatch]]:
    """This rank's micro-batches of a minibatch: every world_size-th row, or as ON_RANK_0 says."""
    if rows_per_micro_batch == ON_RANK_0:
        return [[row] for row in rows] if ranks.is_main else []
    mine, size = rows[ranks.rank :: ranks.world_size], rows_per_micro_batch
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def _updates_of_every_kind(ranks: Ranks, folders: dict[str, Path]) -> dict[str, Result]:
    rows, folder = made_up_rows(NUM_ROWS), folders["qwen3"]
    results = {}
    for family in ("qwen3", "qwen3_moe"):
        for size in (ON_RANK_0, 1, 3, NUM_ROWS):
            batch = as_batch(_share(ranks, rows, size))
            results[f"{family}/{size}"] = _updated(ranks, folders[family], [batch, batch])
    batch = as_batch(_share(ranks, rows, 3))
    decay = {"weight_decay": 0.1}
    for name, policy, update, loss in (
        ("again", {}, {}, {}),
        ("one step", {}, decay, {}),
        ("recomputed", {"gradient_checkpointing": True}, {}, {}),
        ("chunked", {"logprob_chunk_tokens": 5}, {}, {}),
        ("bfloat16", {"compute_dtype": "bfloat16"}, decay, {}),
        ("kl", {}, {}, {"kl_coef": 0.5}),
        *((name, {}, {}, {"correction": name, **limits}) for name, limits in CORRECTED.items()),
    ):
        batches = [batch] if update else [batch, batch]
        results[name] = _updated(ranks, folder, batches, policy=policy, update=update, loss=loss)
    halves = as_batch(_share(ranks, rows[:3], 1), _share(ranks, rows[3:], 2))
    results["several"] = _updated(ranks, folder, [halves], update={"num_minibatches": 2, "num_epochs": 2, "lr": 0.1})
    results["nothing"] = _updated(ranks, folder, [as_batch([])])
    results["then nothing"] = _updated(ranks, folder, [batch, as_batch([])])
    results["before it"] = _updated(ranks, folder, [batch])
    return results


@pytest.fixture(scope="module")
def on_one(tiny_models: dict[str, Path]) -> dict[str, Result]:
    """Updates of every kind by one rank."""
    return run_ranks(_updates_of_every_kind, tiny_models, world_size=1)[0]


@pytest.fixture(scope="module")
def on_two(tiny_models: dict[str, Path]) -> list[dict[str, Result]]:
    """The same by two ranks."""
    return run_ranks(_updates_of_every_kind, tiny_models, world_size=2)


def _plain_step(folder: Path, update: UpdateConfig) -> tuple[dict[str, Tensor], float, float]:
    """Weights, loss and gradient norm of one optimizer step by torch and transformers alone, on whole logits."""
    model, rows = AutoModelForCausalLM.from_pretrained(folder).eval(), made_up_rows(NUM_ROWS)
    betas = (update.beta1, update.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=update.lr, betas=betas, eps=update.eps, weight_decay=update.weight_decay
    )
    num_tokens = sum(int(row.loss_mask_BT.sum()) for row in rows)
    loss = torch.zeros(())
    for row in rows:
        logprobs_BTV = model(row.token_ids_BT).logits[:, :-1].log_softmax(dim=-1)
        logprobs_BT = logprobs_BTV.gather(-1, row.token_ids_BT[:, 1:, None]).squeeze(-1)
        weights_BT = (logprobs_BT.detach() - row.engine_logprobs_BT[:, 1:]).exp().clamp(max=2.0)
        ratio_BT = (logprobs_BT - logprobs_BT.detach()).exp()
        losses_BT = -ratio_BT * weights_BT * row.advantages_B[:, None]
        loss = loss + losses_BT[row.loss_mask_BT[:, 1:]].sum() / num_tokens
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), update.max_grad_norm)
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, loss.item(), grad_norm.item()


def test_one_step_is_that_of_plain_torch(
    tiny_models: dict[str, Path], on_one: dict[str, Result], on_two: list[dict[str, Result]]
) -> None:
    folder = tiny_models["qwen3"]
    update = policy_config(folder, update={"weight_decay": 0.1}).update
    expected, loss, grad_norm = _plain_step(folder, update)
    start = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    assert grad_norm > update.max_grad_norm, "clipping is part of this test"
    assert _farthest(start, expected) > 1e-3
    for results in (on_one, *on_two):
        weights, (metrics,) = results["one step"]
        assert _farthest(weights, expected) < 1e-6
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(grad_norm, rel=1e-5)


def _assert_same(result: Result, expected: Result) -> None:
    assert _farthest(result[0], expected[0]) < 5e-6
    for metrics, values in zip(result[1], expected[1], strict=True):
        assert metrics.keys() == values.keys()
        for name, value in values.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_step_does_not_depend_on_the_split_over_ranks_and_micro_batches(
    family: str, on_one: dict[str, Result], on_two: list[dict[str, Result]]
) -> None:
    for size in (ON_RANK_0, 1, 3, NUM_ROWS):
        for results in (on_one, *on_two):
            _assert_same(results[f"{family}/{size}"], on_one[f"{family}/{NUM_ROWS}"])


@pytest.mark.parametrize("kind", ["recomputed", "chunked"])
def test_saving_memory_does_not_change_the_step(
    kind: str, on_one: dict[str, Result], on_two: list[dict[str, Result]]
) -> None:
    for results in (on_one, *on_two):
        _assert_same(results[kind], on_one["qwen3/3"])


@pytest.mark.parametrize("kind", ["kl", "several", "nothing", *CORRECTED])
def test_ranks_do_not_change_other_kinds_of_steps(
    kind: str, on_one: dict[str, Result], on_two: list[dict[str, Result]]
) -> None:
    for results in on_two:
        _assert_same(results[kind], on_one[kind])


def test_every_rank_returns_the_same_metrics_and_they_repeat_bit_for_bit(on_two: list[dict[str, Result]]) -> None:
    for kind, (weights, metrics) in on_two[0].items():
        assert metrics == on_two[1][kind][1]
        assert _farthest(weights, on_two[1][kind][0]) == 0
    assert _farthest(on_two[0]["again"][0], on_two[0]["qwen3/3"][0]) == 0
    assert on_two[0]["again"][1] == on_two[0]["qwen3/3"][1]


def test_metrics_say_what_was_measured(tiny_models: dict[str, Path], on_one: dict[str, Result]) -> None:
    rows = made_up_rows(NUM_ROWS)
    model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"]).eval()
    gaps, entropies, gaps_by_row = [], [], {}
    for row in rows:
        with torch.no_grad():
            logprobs_BTV = model(row.token_ids_BT).logits[:, :-1].log_softmax(dim=-1)
        mask_BT = row.loss_mask_BT[:, 1:]
        logprobs_BT = logprobs_BTV.gather(-1, row.token_ids_BT[:, 1:, None]).squeeze(-1)
        gaps_of_row = (logprobs_BT - row.engine_logprobs_BT[:, 1:])[mask_BT].tolist()
        gaps_by_row.setdefault(int(row.ages_BT.max()), []).append(gaps_of_row)
        gaps += gaps_of_row
        entropies += (-(logprobs_BTV.exp() * logprobs_BTV).sum(dim=-1))[mask_BT].tolist()
    num_tokens = len(gaps)
    first, second = on_one["qwen3/3"][1]
    # With several optimizer steps too, the gap is that of the weights the rollout came from.
    for metrics in (first, on_one["several"][1][0]):
        assert metrics["gap/mean_abs"] == pytest.approx(sum(map(abs, gaps)) / num_tokens, abs=1e-5)
        assert metrics["gap/max_abs"] == pytest.approx(max(map(abs, gaps)), abs=1e-5)
        assert metrics["entropy/mean"] == pytest.approx(sum(entropies) / num_tokens, abs=1e-5)
        assert metrics["tokens/trained"] == num_tokens
    assert first["correction/capped_share"] == pytest.approx(sum(math.exp(gap) > 2 for gap in gaps) / num_tokens)
    assert first["correction/capped_share"] > 0
    assert gaps_by_row.keys() == {0, 1}, "rows of two ages are part of this test"
    for age, of_age in gaps_by_row.items():
        of_tokens = [gap for row in of_age for gap in row]
        assert first[f"gap/age_{age}/mean_abs"] == pytest.approx(sum(map(abs, of_tokens)) / len(of_tokens), abs=1e-5)
        assert first[f"gap/age_{age}/num_tokens"] == len(of_tokens)
    assert (first["clip/low_share"], first["clip/high_share"]) == (0, 0), "one optimizer step has ratio 1"
    assert (first["version"], second["version"], first["lr"]) == (1, 2, 1e-2)
    assert second["gap/mean_abs"] > first["gap/mean_abs"], "the policy moved away from the engine's old weights"


def test_every_correction_says_what_it_capped_or_masked_and_changes_the_step(
    tiny_models: dict[str, Path], on_one: dict[str, Result]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"]).eval()
    gaps = []
    for row in made_up_rows(NUM_ROWS):
        with torch.no_grad():
            logprobs_BTV = model(row.token_ids_BT).logits[:, :-1].log_softmax(dim=-1)
        logprobs_BT = logprobs_BTV.gather(-1, row.token_ids_BT[:, 1:, None]).squeeze(-1)
        gaps.append((logprobs_BT - row.engine_logprobs_BT[:, 1:])[row.loss_mask_BT[:, 1:]])
    num_tokens = sum(len(gap) for gap in gaps)
    products, means = [gap.sum().exp().item() for gap in gaps], [gap.mean().exp().item() for gap in gaps]
    tokens = torch.cat(gaps).exp()

    def sequences(kept: list[bool]) -> dict[str, float]:
        lost = [len(gap) for gap, is_kept in zip(gaps, kept, strict=True) if not is_kept]
        assert 0 < len(lost) < NUM_ROWS
        return {
            "correction/masked_share": sum(lost) / num_tokens,
            "correction/masked_sequences_share": len(lost) / NUM_ROWS,
        }

    masked = (tokens < 0.5) | (tokens > 2)
    whole = sum(bool(((gap.exp() < 0.5) | (gap.exp() > 2)).all()) for gap in gaps)
    capped = [len(gap) for gap, product in zip(gaps, products, strict=True) if product > 1.2]
    expected = {
        "off": {},
        "token_mask": {
            "correction/masked_share": int(masked.sum()) / num_tokens,
            "correction/masked_sequences_share": whole / NUM_ROWS,
        },
        "sequence_truncate": {"correction/capped_share": sum(capped) / num_tokens},
        "sequence_mask": sequences([0.5 <= product <= 3 for product in products]),
        "geometric_mask": sequences([0.8 <= mean <= 1.25 for mean in means]),
    }
    for name, shares in expected.items():
        weights, (first, _) = on_one[name]
        assert {key: value for key, value in first.items() if key.startswith("correction/")} == pytest.approx(shares)
        assert _farthest(weights, on_one["qwen3/3"][0]) > 1e-4


def test_several_steps_clip_and_the_reference_stays(on_one: dict[str, Result]) -> None:
    (several,) = on_one["several"][1]
    assert several["version"] == 4
    assert several["clip/low_share"] + several["clip/high_share"] > 0
    first, second = on_one["kl"][1]
    assert first["kl/reference"] == pytest.approx(0, abs=1e-7)
    assert second["kl/reference"] > 1e-3
    assert "kl/reference" not in several


def test_a_minibatch_without_loss_tokens_is_no_optimizer_step(
    tiny_models: dict[str, Path], on_two: list[dict[str, Result]]
) -> None:
    before, after = on_two[0]["before it"][0], on_two[0]["then nothing"][0]
    assert _farthest(after, before) == 0, "momentum must not move the weights without a gradient"
    weights, (metrics,) = on_two[0]["nothing"]
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"]).named_parameters())
    assert _farthest(weights, start) == 0
    assert metrics == {"loss": 0, "grad_norm": 0, "lr": 1e-2, "tokens/trained": 0, "version": 0}


def test_bfloat16_compute_trains_float32_weights_in_the_same_direction(
    tiny_models: dict[str, Path], on_two: list[dict[str, Result]]
) -> None:
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"]).named_parameters())
    steps = []
    for kind in ("bfloat16", "one step"):
        weights = on_two[0][kind][0]
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        steps.append(torch.cat([(weights[name] - start[name].detach()).flatten() for name in weights]))
    assert torch.cosine_similarity(steps[0], steps[1], dim=0) > 0.99
    assert not torch.equal(steps[0], steps[1])


def _layer_forwards(ranks: Ranks, folder: Path) -> list[int]:
    counts = []
    for is_recomputed in (False, True):
        config = policy_config(folder, policy={"gradient_checkpointing": is_recomputed})
        policy, calls = Policy(config, ranks, folder), []
        policy.scorer.hf.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        policy.update(as_batch([made_up_rows(2)]))
        counts.append(len(calls))
        assert not policy.scorer.hf.model.layers[0].mlp.training
    return counts


def test_gradient_checkpointing_runs_each_layer_once_more(tiny_models: dict[str, Path]) -> None:
    assert run_ranks(_layer_forwards, tiny_models["qwen3"], world_size=1) == [[1, 2]]


def _with_a_nan(ranks: Ranks, folder: Path) -> tuple[list[str], float]:
    policy = Policy(policy_config(folder), ranks, folder)
    good = as_batch(_share(ranks, made_up_rows(4), 1))
    bad = as_batch(_share(ranks, made_up_rows(4), 1))
    if ranks.rank == 1:
        bad.minibatches[0][1].advantages_B[0] = torch.nan
    policy.update(good)
    before, errors = _weights(policy), []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            policy.update(bad)
        errors.append(str(error.value))
    assert policy.num_updates == 1
    farthest = _farthest(_weights(policy), before)
    policy.update(good)  # the bad gradient is gone
    return errors, farthest


def test_a_loss_that_is_not_finite_stops_every_rank_before_the_step(tiny_models: dict[str, Path]) -> None:
    for errors, farthest in run_ranks(_with_a_nan, tiny_models["qwen3"]):
        assert errors == ["optimizer update 1: loss must be finite, got nan on rank 1"] * 2
        assert farthest == 0


def _with_a_gap(ranks: Ranks, folder: Path, stop: float) -> list[tuple[str, float, int]]:
    results = []
    rows = _share(ranks, made_up_rows(4), 1)
    for update, batch in (({}, as_batch(rows)), ({"num_minibatches": 2}, as_batch(rows[:1], rows[1:]))):
        policy = Policy(policy_config(folder, update=update, gap=GapConfig(stop=stop)), ranks, folder)
        before = _weights(policy)
        with pytest.raises(RuntimeError) as error:
            policy.update(batch)
        assert all(parameter.grad is None for parameter in policy.parameters.values())
        results.append((str(error.value), _farthest(_weights(policy), before), policy.num_updates))
    return results


def test_a_gap_above_its_limit_stops_every_rank_before_the_first_step(tiny_models: dict[str, Path]) -> None:
    rows = run_ranks(_with_a_gap, tiny_models["qwen3"], 0.3)
    assert rows[0] == rows[1]
    for error, farthest, num_updates in rows[0]:
        assert error.startswith("optimizer update 0: gap/mean_abs must be at most gap.stop 0.3, got 0.")
        assert "gap/kl " in error
        assert (farthest, num_updates) == (0, 0)


def _warnings(ranks: Ranks, folder: Path) -> list[list[str]]:
    told = []
    for limits in (GapConfig(warn=0.3, stop=100.0), GapConfig(warn=100.0), GapConfig(warn=0.0)):
        policy, messages = Policy(policy_config(folder, gap=limits), ranks, folder), []
        handler = logging.Handler()
        handler.emit = lambda record, messages=messages: messages.append(record.getMessage())
        logger = logging.getLogger("colo.policy.update")
        logger.addHandler(handler)
        policy.update(as_batch(_share(ranks, made_up_rows(4), 1)))
        logger.removeHandler(handler)
        assert policy.num_updates == 1
        told.append(messages)
    return told


def test_a_gap_above_the_lower_limit_is_warned_of_once_and_the_run_goes_on(tiny_models: dict[str, Path]) -> None:
    first, second = run_ranks(_warnings, tiny_models["qwen3"])
    assert second == [[], [], []]
    (told,), *none = first
    assert told.startswith("optimizer update 0: gap/mean_abs must be at most gap.warn 0.3, got 0.")
    assert none == [[], []]


def _save(policy: Policy, source: Path, folder: Path) -> None:
    weights, moments = _weights(policy), {name: tensor.clone() for name, tensor in policy.optimizer_tensors()}
    if policy.ranks.is_main:
        folder.mkdir()
        shutil.copy(source / "config.json", folder)
        save_file(weights, folder / "model.safetensors")
        names = sorted(moments)
        save_file({name: moments[name] for name in names[::2]}, folder / "optimizer-00001.safetensors")
        save_file({name: moments[name] for name in names[1::2]}, folder / "optimizer-00002.safetensors")


def _stop_and_resume(
    ranks: Ranks, source: Path, folder: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, int]]:
    batch = as_batch(_share(ranks, made_up_rows(NUM_ROWS), 2))
    config = policy_config(source, update={"schedule": "linear", "warmup_steps": 3})
    policy = Policy(config, ranks, source)
    policy.update(batch)
    policy.update(batch)
    state = policy.state()
    _save(policy, source, folder)
    ranks.gather(None, "the checkpoint")
    policy.update(batch)
    return _weights(policy), _resumed(ranks, source, folder, state), state


def _resumed(ranks: Ranks, source: Path, folder: Path, state: dict[str, int]) -> dict[str, Tensor]:
    config = policy_config(source, update={"schedule": "linear", "warmup_steps": 3})
    policy = Policy(config, ranks, source)
    places = _addresses(policy)
    policy.load(folder)
    policy.load_state(state)
    policy.load_optimizer(folder)
    assert _addresses(policy) == places, "a checkpoint must be loaded into the shards where they are"
    policy.update(as_batch(_share(ranks, made_up_rows(NUM_ROWS), 2)))
    assert policy.num_updates == 3
    return _weights(policy)


def test_a_resumed_policy_goes_on_bit_for_bit_and_on_other_numbers_of_ranks(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    folder, source = tmp_path / "step-2", tiny_models["qwen3_moe"]
    results = run_ranks(_stop_and_resume, source, folder)
    for whole, resumed, state in results:
        assert _farthest(resumed, whole) == 0
        assert state == {"num_updates": 2}
    (on_one,) = run_ranks(_resumed, source, folder, {"num_updates": 2}, world_size=1)
    assert _farthest(on_one, results[0][0]) < 1e-5


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1.0, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5))]),
    ],
)
def test_learning_rate_warms_up_and_decays(schedule: str, expected: list[float]) -> None:
    # Two steps of warm-up, then four of decay towards 0.2, which a seventh step would have.
    update = UpdateConfig(lr=3.0, schedule=schedule, warmup_steps=2, min_lr_ratio=0.2)
    rates = [learning_rate(index, 6, update) for index in range(6)]
    assert rates == pytest.approx([3 * share for share in expected])
