"""The gap: the policy's logprob minus the engine's, of the same token under what should be the same weights.

It is 0 where both compute the same distribution, rounding aside; weights that differ, or a temperature applied
on one side only, show up here first.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from colo.rl.losses import k3

SUM_NAMES = ("num_tokens", "gap_sum", "gap_abs_sum", "gap_kl_sum")
"""What `gap_sums` returns that adds up over micro-batches and ranks."""
MAX_NAME = "gap_abs_max"
"""What it returns that does not: take the largest."""


def gap_sums(policy_logprobs_BT: Tensor, engine_logprobs_BT: Tensor, loss_mask_BT: Tensor) -> dict[str, Tensor]:
    """Sum the gap over the loss tokens of a micro-batch.

    Args:
        policy_logprobs_BT: [B, T] nats, before any optimizer step on this rollout.
        engine_logprobs_BT: [B, T] nats.
        loss_mask_BT: [B, T] bool; what stands off it is not read.

    Returns:
        Detached float64 scalars: SUM_NAMES, to be added, and MAX_NAME, of which the largest counts (0 without tokens).
    """
    difference_BT = policy_logprobs_BT.detach().double() - engine_logprobs_BT.double()
    gap_BT = torch.where(loss_mask_BT, difference_BT, torch.zeros_like(difference_BT))
    return {
        "num_tokens": loss_mask_BT.sum().double(),
        "gap_sum": gap_BT.sum(),
        "gap_abs_sum": gap_BT.abs().sum(),
        "gap_kl_sum": k3(gap_BT).sum(),
        MAX_NAME: gap_BT.abs().amax() if gap_BT.numel() else gap_BT.sum(),
    }


def gap_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Turn sums over all micro-batches and ranks, and the largest MAX_NAME, into metrics.

    Returns:
        In nats per loss token: `gap/mean`, `gap/mean_abs`, `gap/max_abs`, and `gap/kl`, the k3 estimate of
        KL(engine || policy). Empty where no token trained: there is no gap to speak of, and 0 would claim there was.

    Source: k3, joschu.net/blog/kl-approx.html, with exp(gap) the ratio of policy to engine.
    """
    num_tokens = sums["num_tokens"]
    if num_tokens == 0:
        return {}
    return {
        "gap/mean": sums["gap_sum"] / num_tokens,
        "gap/mean_abs": sums["gap_abs_sum"] / num_tokens,
        "gap/max_abs": sums[MAX_NAME],
        "gap/kl": sums["gap_kl_sum"] / num_tokens,
    }
