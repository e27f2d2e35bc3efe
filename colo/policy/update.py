"""One update: forward and backward over micro-batches, and the optimizer steps of a rollout."""

import logging
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from colo.policy import optimizer as adamw
from colo.policy.logprobs import TokenScores
from colo.rl.gap import GapSums, GapTotals, gap_above, gap_metrics
from colo.rl.losses import ALGORITHMS, denominator
from colo.types import Batch, MicroBatch

if TYPE_CHECKING:
    from colo.policy.model import Policy

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Scored:
    """A micro-batch on the device, with the logprobs that do not change during the update."""

    batch: MicroBatch
    is_dummy: bool
    """Stands in where this rank has fewer micro-batches than another: it keeps the collectives in step."""
    old_logprobs_BT: Tensor | None = None
    """The policy's before the first of several optimizer steps; None where there is one, whose own they are."""
    reference_logprobs_BT: Tensor | None = None


@dataclass(kw_only=True)
class _Minibatch:
    """What one optimizer step is made of."""

    micro_batches: list[_Scored]
    num_loss_tokens: int
    """Over all ranks."""
    num_sequences: int
    """Completions that train, over all ranks."""
    denominator: float
    """Over all ranks; 0 where nothing trains."""


@dataclass
class _Sums:
    """This rank's sums over loss tokens, by name, kept on the device until the end of the update."""

    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value.double() if name in self.sums else value.double()


@dataclass
class _FirstPass(_Sums):
    """What the weights that the rollout came from say about it: before the first optimizer step."""

    gap: GapSums = field(default_factory=GapSums)


@dataclass(kw_only=True)
class _Step:
    """How an optimizer step went, over all ranks."""

    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float
    gap: dict[str, float]
    """The update's gap; empty in steps after the first."""


def update_policy(policy: "Policy", batch: Batch) -> dict[str, float]:
    """As `Policy.update`."""
    started = time.perf_counter()
    policy.offload.start_update()
    update = policy.config.update
    num_steps = len(batch.minibatches) * update.num_epochs
    minibatches = _prepare(policy, batch)
    sums, first_pass = _Sums(), _FirstPass()
    steps: list[_Step] = []
    if policy.reference is not None or num_steps > 1:
        _score_without_gradient(policy, minibatches, num_steps > 1, first_pass)
    for _ in range(update.num_epochs):
        for minibatch in minibatches:
            own_loss = _accumulate_gradients(policy, minibatch, sums, first_pass if num_steps == 1 else None)
            steps.append(_optimizer_step(policy, minibatch, own_loss, None if steps else first_pass.gap.totals()))
    num_trained = sum(minibatch.num_loss_tokens for minibatch in minibatches)
    return (
        _reduced(policy, batch, minibatches, sums, first_pass)
        | steps[0].gap
        | {
            "loss": sum(step.loss for step in steps) / num_steps,
            "grad_norm": sum(step.grad_norm for step in steps) / num_steps,
            "lr": steps[-1].lr,
            "tokens/trained": float(num_trained),
            "version": float(policy.num_updates),
            "time_s/update": time.perf_counter() - started,
        }
    )


def _prepare(policy: "Policy", batch: Batch) -> list[_Minibatch]:
    """Move micro-batches to the device, and agree with the other ranks on their number and on the denominator."""
    counts = [
        (len(micros), sum(int(m.loss_mask_BT.sum()) for m in micros), sum(_num_sequences(m) for m in micros))
        for micros in batch.minibatches
    ]
    rows = policy.ranks.gather(counts, "agreeing on micro-batches")
    lengths = {len(row) for row in rows}
    assert len(lengths) == 1, f"ranks must agree on the number of minibatches, got {sorted(lengths)}"
    name = ALGORITHMS[policy.config.algorithm].denominator
    minibatches = []
    for index, micros in enumerate(batch.minibatches):
        num_micro_batches = max(1, *(row[index][0] for row in rows))
        num_tokens, num_sequences = (sum(row[index][column] for row in rows) for column in (1, 2))
        scored = [_Scored(batch=_to_device(micro, policy.ranks.device), is_dummy=False) for micro in micros]
        while len(scored) < num_micro_batches:
            scored.append(_Scored(batch=_dummy(policy.ranks.device), is_dummy=True))
        divisor = denominator(name, num_tokens, num_sequences, batch.max_new_tokens) if num_tokens else 0.0
        minibatches.append(
            _Minibatch(
                micro_batches=scored, num_loss_tokens=num_tokens, num_sequences=num_sequences, denominator=divisor
            )
        )
    return minibatches


def _num_sequences(micro: MicroBatch) -> int:
    return int(micro.loss_mask_BT.any(dim=1).sum())


def _to_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    return replace(
        micro,
        token_ids_BT=micro.token_ids_BT.to(device),
        loss_mask_BT=micro.loss_mask_BT.to(device),
        engine_logprobs_BT=micro.engine_logprobs_BT.to(device),
        ages_BT=micro.ages_BT.to(device),
        advantages_B=micro.advantages_B.to(device),
    )


def _dummy(device: torch.device) -> MicroBatch:
    return MicroBatch(
        token_ids_BT=torch.zeros(1, 2, dtype=torch.int64, device=device),
        loss_mask_BT=torch.zeros(1, 2, dtype=torch.bool, device=device),
        engine_logprobs_BT=torch.zeros(1, 2, device=device),
        ages_BT=torch.zeros(1, 2, dtype=torch.int32, device=device),
        advantages_B=torch.zeros(1, device=device),
    )


def _score_without_gradient(
    policy: "Policy", minibatches: list[_Minibatch], has_old: bool, first_pass: _FirstPass
) -> None:
    """Fill in old and reference logprobs; where there are old ones, the gap is that of this pass."""
    distribution = policy.config.scored
    with torch.no_grad():
        for minibatch in minibatches:
            for scored in minibatch.micro_batches:
                token_ids_BT = scored.batch.token_ids_BT
                if policy.reference is not None:
                    scored.reference_logprobs_BT = policy.reference(token_ids_BT, distribution).logprobs_BT
                if has_old:
                    scores = policy.scorer(token_ids_BT, distribution)
                    scored.old_logprobs_BT = scores.logprobs_BT
                    _measure(scored, scores, first_pass)
    # After a forward without a backward FSDP2 keeps the root's parameters whole, and names would find those.
    if has_old:
        policy.scorer.reshard()
    if policy.reference is not None:
        policy.reference.reshard()


def _measure(scored: _Scored, scores: TokenScores, first_pass: _FirstPass) -> None:
    mask_BT = scored.batch.loss_mask_BT
    entropy = torch.where(mask_BT, scores.entropy_BT, 0.0).double().sum()
    first_pass.gap.add(scores.logprobs_BT, scored.batch)
    first_pass.add({"entropy": entropy, "num_outside_kept": (mask_BT & scores.is_outside_BT).sum()})


def _accumulate_gradients(policy: "Policy", minibatch: _Minibatch, sums: _Sums, first_pass: _FirstPass | None) -> float:
    """Forward and backward over a minibatch. Collective.

    Returns:
        This rank's part of the loss, already divided by the step's denominator.
    """
    config = policy.config
    scale = 1 / minibatch.denominator if minibatch.denominator else 0.0
    total = torch.zeros((), dtype=torch.float64, device=policy.ranks.device)
    for scored in minibatch.micro_batches:
        scores = policy.scorer(scored.batch.token_ids_BT, config.scored)
        logprobs_BT = scores.logprobs_BT
        old_BT = logprobs_BT.detach() if scored.old_logprobs_BT is None else scored.old_logprobs_BT
        loss_sum, loss_sums = ALGORITHMS[config.algorithm].loss(
            logprobs_BT, old_BT, scored.batch, config.loss, scored.reference_logprobs_BT
        )
        if first_pass is not None:
            _measure(scored, scores, first_pass)
        sums.add(loss_sums)
        total += loss_sum.detach().double()
        if scored.is_dummy:
            loss_sum = logprobs_BT.sum() * 0.0
        (loss_sum * scale).backward()
    return total.item() * scale


def _optimizer_step(policy: "Policy", minibatch: _Minibatch, loss: float, gap: GapTotals | None) -> _Step:
    """Check, clip and apply the gradients. Collective.

    Args:
        loss: This rank's part.
        gap: This rank's, before the first optimizer step; None before later ones.

    Raises:
        RuntimeError: a rank's loss or gradient is not finite, or the gap is above `gap.stop`; the weights are as they
            were.
    """
    config, parameters = policy.config, list(policy.parameters.values())
    gradients = adamw.local_gradients(parameters)
    policy.gradient_bytes = adamw.storage_bytes(gradients)
    rows = policy.ranks.gather((loss, adamw.sum_of_squares(gradients), gap), "the gradient norm and the gap")
    _refuse_non_finite(policy, rows)
    metrics = gap_metrics([row[2] for row in rows if row[2] is not None])
    _check_gap(policy, metrics)
    lr = adamw.learning_rate(policy.num_updates, config.num_updates, config.update)
    if minibatch.num_loss_tokens == 0:
        # Not a step: AdamW's momentum and weight decay would move the weights all the same.
        policy.optimizer.zero_grad()
        if policy.ranks.is_main:
            logger.warning("optimizer update %d is left out: no token trains on any rank", policy.num_updates)
        return _Step(lr=lr, gap=metrics)
    grad_norm = math.sqrt(sum(row[1] for row in rows))
    adamw.clip(gradients, grad_norm, config.update.max_grad_norm)
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    policy.offload.bring_moments_back()
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    policy.num_updates += 1
    return _Step(loss=sum(row[0] for row in rows), grad_norm=grad_norm, lr=lr, gap=metrics)


def _refuse_non_finite(policy: "Policy", rows: list[tuple[float, float, GapTotals | None]]) -> None:
    for what, column in (("loss", 0), ("sum of squared gradients", 1)):
        for rank, row in enumerate(rows):
            value = row[column]
            assert isinstance(value, float), f"the {what} of rank {rank} must be a number"
            if not math.isfinite(value):
                policy.optimizer.zero_grad()
                policy.ranks.give_way(rank)
                raise RuntimeError(
                    f"optimizer update {policy.num_updates}: {what} must be finite, got {value} on rank {rank}"
                )


def _check_gap(policy: "Policy", metrics: dict[str, float]) -> None:
    """Stop or warn by the update's gap, which is equal on every rank."""
    limits = policy.config.gap
    told = gap_above(metrics, "gap.stop", limits.stop)
    if told:
        policy.optimizer.zero_grad()
        raise RuntimeError(f"optimizer update {policy.num_updates}: {told}")
    told = gap_above(metrics, "gap.warn", limits.warn)
    if told and policy.ranks.is_main:
        logger.warning("optimizer update %d: %s", policy.num_updates, told)


def _reduced(
    policy: "Policy", batch: Batch, minibatches: list[_Minibatch], sums: _Sums, first_pass: _FirstPass
) -> dict[str, float]:
    """Sum what every rank counted. Collective."""
    values = {name: value.item() for name, value in (sums.sums | first_pass.sums).items()}
    counts = {f"batch/{name.removeprefix('num_')}": value for name, value in batch.metrics.items()}
    total = policy.ranks.sum(values | counts, "the update's metrics")
    metrics = {name: total[name] for name in counts}
    num_tokens = sum(minibatch.num_loss_tokens for minibatch in minibatches)
    if not num_tokens:
        return metrics
    num_sequences = sum(minibatch.num_sequences for minibatch in minibatches)
    shares = {
        "clip/low_share": ("num_clipped_low", num_tokens),
        "clip/high_share": ("num_clipped_high", num_tokens),
        "correction/capped_share": ("num_capped", num_tokens),
        "correction/masked_share": ("num_masked", num_tokens),
        "correction/masked_sequences_share": ("num_masked_sequences", num_sequences),
        "kl/reference": ("kl_sum", num_tokens),
    }
    num_epochs = policy.config.update.num_epochs
    metrics |= {name: total[key] / (number * num_epochs) for name, (key, number) in shares.items() if key in total}
    metrics["entropy/mean"] = total["entropy"] / num_tokens
    if policy.config.scored.truncates:
        metrics["gap/outside_kept"] = total["num_outside_kept"]
    return metrics
