"""Policy losses, and the algorithms that a recipe can name.

A loss returns a sum over loss tokens. The caller divides it by one number for the whole optimizer step,
over all micro-batches and ranks, so that the gradient does not depend on how the step is cut up.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from colo.config import LossConfig
from colo.rl.advantages import dr_grpo_advantages, grpo_advantages, rloo_advantages
from colo.rl.corrections import correction_weights
from colo.types import MicroBatch

LossSums = tuple[Tensor, dict[str, Tensor]]
"""The loss, summed over loss tokens, and detached sums by name for the metrics."""


@dataclass(frozen=True)
class Algorithm:
    """What `algorithm` in a recipe stands for."""

    advantages: Callable[[Tensor], Tensor]
    """[P, G] rewards to [P, G] advantages."""
    loss: Callable[[Tensor, Tensor, MicroBatch, LossConfig, Tensor | None], LossSums]
    """As `clipped_loss`."""
    denominator: str
    """What the summed loss is divided by: a name that `denominator` knows."""


def clipped_loss(
    policy_logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    batch: MicroBatch,
    loss: LossConfig,
    reference_logprobs_BT: Tensor | None,
) -> LossSums:
    """PPO's clipped loss for each token, weighted by the correction for how it was sampled, plus a KL penalty.

    Per loss token, with r = exp(policy - old), A the completion's advantage, and w from `correction_weights`:
    `-w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * (exp(d) - 1 - d)`, d = reference - policy.

    Args:
        policy_logprobs_BT: [B, T] float32 nats, with gradient; position t is of token t.
        old_logprobs_BT: [B, T] of the policy that the rollout came from, before its first optimizer step.
        batch: Says which tokens count; what stands off its mask is never read, NaN included.
        loss: The knobs.
        reference_logprobs_BT: [B, T] of the frozen reference; needed when `loss.kl_coef` is above 0.

    Returns:
        The sum over loss tokens (not divided), and detached sums: `num_clipped_low`, `num_clipped_high` (tokens whose
        gradient the clip removes), those of `correction_weights`, and `kl_sum` (nats) if there is a reference.

    Source: clip, PPO, arxiv.org/abs/1707.06347, eq. 7; separate limits, DAPO, arxiv.org/abs/2503.14476;
    KL to the reference, GRPO, arxiv.org/abs/2402.03300, eq. 4.
    """
    mask_BT = batch.loss_mask_BT
    advantages_BT = batch.advantages_B[:, None].expand_as(policy_logprobs_BT)
    ratio_BT = torch.exp(_on_mask(policy_logprobs_BT - old_logprobs_BT, mask_BT))
    clipped_BT = ratio_BT.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    surrogate_BT = torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    weights_BT, correction_sums = correction_weights(old_logprobs_BT, batch, loss)
    losses_BT = -weights_BT * surrogate_BT
    sums = {
        "num_clipped_low": (mask_BT & (advantages_BT < 0) & (ratio_BT < 1 - loss.clip_low)).sum(),
        "num_clipped_high": (mask_BT & (advantages_BT > 0) & (ratio_BT > 1 + loss.clip_high)).sum(),
    } | correction_sums
    assert reference_logprobs_BT is not None or loss.kl_coef == 0, "loss.kl_coef above 0 needs reference logprobs"
    if reference_logprobs_BT is not None:
        kl_BT = k3(_on_mask(reference_logprobs_BT - policy_logprobs_BT, mask_BT))
        sums["kl_sum"] = kl_BT.detach().sum()
        losses_BT = losses_BT + loss.kl_coef * kl_BT
    return _on_mask(losses_BT, mask_BT).sum(), sums


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) from samples of p as exp(d) - 1 - d, d = log q - log p: unbiased, never negative.

    Source: joschu.net/blog/kl-approx.html, the estimator k3.
    """
    return torch.expm1(log_ratio) - log_ratio


def denominator(name: str, num_loss_tokens: float, num_sequences: float, max_new_tokens: int) -> float:
    """What an optimizer step's summed loss is divided by; 0 where nothing trains.

    Args:
        name: tokens; sequences (each completion counts once, its tokens summed: RLOO,
            arxiv.org/abs/2402.14740); sequences_x_limit (Dr. GRPO, arxiv.org/abs/2503.20783: a constant length, so
            that long completions are not favoured).
        num_loss_tokens: Over all micro-batches and ranks of the optimizer step.
        num_sequences: Completions that train, likewise.
        max_new_tokens: The length limit of a completion.

    Raises:
        ValueError: no such name.
    """
    numbers = {
        "tokens": float(num_loss_tokens),
        "sequences": float(num_sequences),
        "sequences_x_limit": float(num_sequences) * max_new_tokens,
    }
    if name not in numbers:
        raise ValueError(f"a loss's denominator must be one of {', '.join(numbers)}, got {name!r}")
    return numbers[name]


def _on_mask(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # `where`, since 0 * NaN is NaN, forward and backward.
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))


ALGORITHMS = {
    "grpo": Algorithm(grpo_advantages, clipped_loss, "tokens"),
    "dr_grpo": Algorithm(dr_grpo_advantages, clipped_loss, "sequences_x_limit"),
    "rloo": Algorithm(rloo_advantages, clipped_loss, "sequences"),
}
"""By the name in a recipe. The token-level mean for GRPO is DAPO's, arxiv.org/abs/2503.14476."""
