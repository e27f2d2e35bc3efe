"""One update: forward and backward over micro-batches, and the optimizer steps of a rollout."""

import logging
import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from colo.policy import optimizer as adamw
from colo.rl.gap import MAX_NAME, SUM_NAMES, gap_metrics, gap_sums
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
    denominator: float
    """Over all ranks; 0 where nothing trains."""


@dataclass
class _Sums:
    """This rank's sums over loss tokens, by name, kept on the device until the end of the update."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    largest: Tensor | None = None

    def add(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value.double() if name in self.sums else value.double()

    def add_gap(self, sums: dict[str, Tensor]) -> None:
        self.add({name: sums[name] for name in SUM_NAMES})
        self.largest = sums[MAX_NAME] if self.largest is None else torch.maximum(self.largest, sums[MAX_NAME])


def update_policy(policy: "Policy", batch: Batch) -> dict[str, float]:
    """As `Policy.update`."""
    started = time.perf_counter()
    update = policy.config.update
    num_steps = len(batch.minibatches) * update.num_epochs
    minibatches = _prepare(policy, batch)
    sums, first_pass = _Sums(), _Sums()
    losses, grad_norms, lr = [], [], 0.0
    if policy.reference is not None or num_steps > 1:
        _score_without_gradient(policy, minibatches, num_steps > 1, first_pass)
    for _ in range(update.num_epochs):
        for minibatch in minibatches:
            own_loss = _accumulate_gradients(policy, minibatch, sums, first_pass if num_steps == 1 else None)
            loss, grad_norm, lr = _optimizer_step(policy, minibatch, own_loss)
            losses.append(loss)
            grad_norms.append(grad_norm)
    num_trained = sum(minibatch.num_loss_tokens for minibatch in minibatches)
    metrics = _reduced(policy, batch, sums, first_pass, num_trained, update.num_epochs)
    return metrics | {
        "loss": sum(losses) / num_steps,
        "grad_norm": sum(grad_norms) / num_steps,
        "lr": lr,
        "tokens/trained": float(num_trained),
        "version": float(policy.num_updates),
        "time_s/update": time.perf_counter() - started,
    }


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
        minibatches.append(_Minibatch(micro_batches=scored, num_loss_tokens=num_tokens, denominator=divisor))
    return minibatches


def _num_sequences(micro: MicroBatch) -> int:
    return int(micro.loss_mask_BT.any(dim=1).sum())


def _to_device(micro: MicroBatch, device: torch.device) -> MicroBatch:
    return replace(
        micro,
        token_ids_BT=micro.token_ids_BT.to(device),
        loss_mask_BT=micro.loss_mask_BT.to(device),
        engine_logprobs_BT=micro.engine_logprobs_BT.to(device),
        advantages_B=micro.advantages_B.to(device),
    )


def _dummy(device: torch.device) -> MicroBatch:
    return MicroBatch(
        token_ids_BT=torch.zeros(1, 2, dtype=torch.int64, device=device),
        loss_mask_BT=torch.zeros(1, 2, dtype=torch.bool, device=device),
        engine_logprobs_BT=torch.zeros(1, 2, device=device),
        advantages_B=torch.zeros(1, device=device),
    )


def _score_without_gradient(policy: "Policy", minibatches: list[_Minibatch], has_old: bool, first_pass: _Sums) -> None:
    """Fill in old and reference logprobs; where there are old ones, the gap is that of this pass."""
    temperature = policy.config.scoring_temperature
    with torch.no_grad():
        for minibatch in minibatches:
            for scored in minibatch.micro_batches:
                token_ids_BT = scored.batch.token_ids_BT
                if policy.reference is not None:
                    scored.reference_logprobs_BT, _ = policy.reference(token_ids_BT, temperature)
                if has_old:
                    old_BT, entropy_BT = policy.scorer(token_ids_BT, temperature)
                    scored.old_logprobs_BT = old_BT
                    _measure(scored, old_BT, entropy_BT, first_pass)
    # After a forward without a backward FSDP2 keeps the root's parameters whole, and names would find those.
    if has_old:
        policy.scorer.reshard()
    if policy.reference is not None:
        policy.reference.reshard()


def _measure(scored: _Scored, logprobs_BT: Tensor, entropy_BT: Tensor, first_pass: _Sums) -> None:
    mask_BT = scored.batch.loss_mask_BT
    first_pass.add_gap(gap_sums(logprobs_BT, scored.batch.engine_logprobs_BT, mask_BT))
    first_pass.add({"entropy": torch.where(mask_BT, entropy_BT, 0.0).double().sum()})


def _accumulate_gradients(policy: "Policy", minibatch: _Minibatch, sums: _Sums, first_pass: _Sums | None) -> float:
    """Forward and backward over a minibatch. Collective.

    Returns:
        This rank's part of the loss, already divided by the step's denominator.
    """
    config = policy.config
    scale = 1 / minibatch.denominator if minibatch.denominator else 0.0
    total = torch.zeros((), dtype=torch.float64, device=policy.ranks.device)
    for scored in minibatch.micro_batches:
        logprobs_BT, entropy_BT = policy.scorer(scored.batch.token_ids_BT, config.scoring_temperature)
        old_BT = logprobs_BT.detach() if scored.old_logprobs_BT is None else scored.old_logprobs_BT
        loss_sum, loss_sums = ALGORITHMS[config.algorithm].loss(
            logprobs_BT, old_BT, scored.batch, config.loss, scored.reference_logprobs_BT
        )
        if first_pass is not None:
            _measure(scored, old_BT, entropy_BT, first_pass)
        sums.add(loss_sums)
        total += loss_sum.detach().double()
        if scored.is_dummy:
            loss_sum = logprobs_BT.sum() * 0.0
        (loss_sum * scale).backward()
    return total.item() * scale


def _optimizer_step(policy: "Policy", minibatch: _Minibatch, loss: float) -> tuple[float, float, float]:
    """Check, clip and apply the gradients. Collective.

    Returns:
        The loss and the gradient norm before clipping, over all ranks, and the learning rate.

    Raises:
        RuntimeError: a rank's loss or gradient is not finite; the weights are as they were.
    """
    config, parameters = policy.config, list(policy.parameters.values())
    gradients = adamw.local_gradients(parameters)
    rows = policy.ranks.gather((loss, adamw.sum_of_squares(gradients)), "the gradient norm")
    for what, column in (("loss", 0), ("sum of squared gradients", 1)):
        for rank, row in enumerate(rows):
            if not math.isfinite(row[column]):
                policy.optimizer.zero_grad()
                policy.ranks.give_way(rank)
                raise RuntimeError(
                    f"optimizer update {policy.num_updates}: {what} must be finite, got {row[column]} on rank {rank}"
                )
    lr = adamw.learning_rate(policy.num_updates, config.num_updates, config.update)
    if minibatch.num_loss_tokens == 0:
        # Not a step: AdamW's momentum and weight decay would move the weights all the same.
        policy.optimizer.zero_grad()
        if policy.ranks.is_main:
            logger.warning("optimizer update %d is left out: no token trains on any rank", policy.num_updates)
        return 0.0, 0.0, lr
    grad_norm = math.sqrt(sum(row[1] for row in rows))
    adamw.clip(gradients, grad_norm, config.update.max_grad_norm)
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    policy.optimizer.step()
    policy.optimizer.zero_grad()
    policy.num_updates += 1
    return sum(row[0] for row in rows), grad_norm, lr


def _reduced(
    policy: "Policy", batch: Batch, sums: _Sums, first_pass: _Sums, num_trained: int, num_epochs: int
) -> dict[str, float]:
    """Sum what every rank counted. Collective."""
    values = {name: value.item() for name, value in (sums.sums | first_pass.sums).items()}
    counts = {f"batch/{name.removeprefix('num_')}": value for name, value in batch.metrics.items()}
    total = policy.ranks.sum(values | counts, "the update's metrics")
    assert first_pass.largest is not None, "the first pass must have seen a micro-batch"
    total[MAX_NAME] = policy.ranks.max(first_pass.largest.item(), "the largest gap")
    metrics = {name: total[name] for name in counts} | gap_metrics(total)
    if not num_trained:
        return metrics
    shares = {
        "clip/low_share": "num_clipped_low",
        "clip/high_share": "num_clipped_high",
        "importance/capped_share": "num_importance_capped",
        "kl/reference": "kl_sum",
    }
    metrics |= {name: total[key] / (num_trained * num_epochs) for name, key in shares.items() if key in total}
    metrics["entropy/mean"] = total["entropy"] / num_trained
    return metrics
