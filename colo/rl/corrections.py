"""Corrections for rollouts that were not sampled from quite the distribution that trains: weights of loss tokens.

The engine computes with other kernels than the policy, and may hold weights that are some updates old. Each function
here turns the log ratio of policy to engine into a weight for every loss token, which multiplies the token's policy
gradient (not its KL penalty) and carries no gradient itself. Without a mismatch every weight is 1.

A masked token has weight 0 and still counts in the loss's denominator: the mean over what the engine sampled estimates
an expectation, to which a sample of weight 0 contributes 0. That is how IcePop and the masked sequence-level estimator
are written, and the denominator is known before the first forward, whatever the split over ranks. (verl and slime
call it rejection and leave such tokens out of the count, which scales a step up by one over the share that is kept.)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from colo.config import MASKING, LossConfig
from colo.types import MicroBatch

Weights = tuple[Tensor, Tensor]
"""[B, T] float32 weights, and [B, T] bool: tokens whose ratio met a limit, and which were capped or masked for it."""


def off(log_ratio_BT: Tensor, loss_mask_BT: Tensor, low: float, high: float) -> Weights:
    """No correction: every weight is 1."""
    return torch.ones_like(log_ratio_BT), torch.zeros_like(loss_mask_BT)


def token_truncate(log_ratio_BT: Tensor, loss_mask_BT: Tensor, low: float, high: float) -> Weights:
    """Give each token min(ratio, high): little variance, and a bias where the cap bites.

    Args:
        log_ratio_BT: [B, T] nats, log(policy / engine) of each loss token, 0 off the loss mask; detached. A row is one
            completion.
        loss_mask_BT: [B, T] bool.
        low: Not read: a small weight does no harm.
        high: The cap, at least 1.

    Source: V-trace's truncated importance weights, arxiv.org/abs/1802.01561, section 4.1; between engine and trainer,
    fengyao.notion.site/off-policy-rl.
    """
    ratio_BT = torch.exp(log_ratio_BT)
    return ratio_BT.clamp(max=high), loss_mask_BT & (ratio_BT > high)


def token_mask(log_ratio_BT: Tensor, loss_mask_BT: Tensor, low: float, high: float) -> Weights:
    """Give each token its ratio where that is in [low, high], else 0; arguments as in `token_truncate`.

    Source: IcePop, ringtech.notion.site/icepop, with low 0.5 and high 5.
    """
    ratio_BT = torch.exp(log_ratio_BT)
    return _masked(ratio_BT, ratio_BT, loss_mask_BT, low, high)


def sequence_truncate(log_ratio_BT: Tensor, loss_mask_BT: Tensor, low: float, high: float) -> Weights:
    """Give all tokens of a completion min(product of their ratios, high); arguments as in `token_truncate`.

    The product is what makes the gradient of the whole completion unbiased. It grows and shrinks with the length.

    Source: truncated importance sampling, Ionides, Journal of Computational and Graphical Statistics 17(2), 2008; for
    completions, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    yingru.notion.site, 2025.
    """
    ratio_BT = torch.exp(_log_sum(log_ratio_BT)).expand(log_ratio_BT.shape)
    return ratio_BT.clamp(max=high).float(), loss_mask_BT & (ratio_BT > high)


def sequence_mask(log_ratio_BT: Tensor, loss_mask_BT: Tensor, low: float, high: float) -> Weights:
    """Give all tokens of a completion the product of their ratios where it is in [low, high], else 0.

    Arguments as in `token_truncate`; source as of `sequence_truncate`, where low is 0.
    """
    ratio_BT = torch.exp(_log_sum(log_ratio_BT)).expand(log_ratio_BT.shape)
    return _masked(ratio_BT, ratio_BT, loss_mask_BT, low, high)


def geometric_mask(log_ratio_BT: Tensor, loss_mask_BT: Tensor, low: float, high: float) -> Weights:
    """Give all tokens of a completion 1 where the geometric mean of their ratios is in [low, high], else 0.

    The mean does not grow with the length, so long completions are not dropped for being long; limits lie close to 1
    (0.999 and 1.001 in the source). The weight inside is 1 and not the token's ratio, as in the source: this selects
    completions on which engine and policy agree, and adds no variance of its own.

    Arguments as in `token_truncate`.

    Source: geometric rejection (Geo-RS), docs/algo/rollout_corr.md of github.com/volcengine/verl.
    """
    num_tokens_B1 = loss_mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    mean_BT = torch.exp(_log_sum(log_ratio_BT) / num_tokens_B1).expand(log_ratio_BT.shape)
    return _masked(torch.ones_like(mean_BT), mean_BT, loss_mask_BT, low, high)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float, float], Weights]] = {
    "off": off,
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric_mask": geometric_mask,
}
"""By the name in a recipe."""


def correction_weights(
    old_logprobs_BT: Tensor, batch: MicroBatch, loss: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh a micro-batch's loss tokens by `loss.correction`.

    Args:
        old_logprobs_BT: [B, T] nats, the policy's before its first optimizer step on this rollout.
        batch: Gives the engine's logprobs; what stands off its loss mask is never read, NaN included.
        loss: Gives the correction and its limits.

    Returns:
        [B, T] detached weights, 1 off the loss mask; and detached sums: `num_capped` tokens of a correction that
        truncates; `num_masked` tokens and `num_masked_sequences` (completions without a token left) of one that masks.
    """
    mask_BT = batch.loss_mask_BT
    difference_BT = old_logprobs_BT.detach() - batch.engine_logprobs_BT
    log_ratio_BT = torch.where(mask_BT, difference_BT, torch.zeros_like(difference_BT))
    weights_BT, has_met_BT = CORRECTIONS[loss.correction](
        log_ratio_BT, mask_BT, loss.correction_low, loss.correction_high
    )
    sums: dict[str, Tensor] = {}
    if loss.correction in MASKING:
        sums["num_masked"] = has_met_BT.sum()
        sums["num_masked_sequences"] = (mask_BT.any(dim=1) & (has_met_BT == mask_BT).all(dim=1)).sum()
    elif loss.correction != "off":
        sums["num_capped"] = has_met_BT.sum()
    return torch.where(mask_BT, weights_BT, torch.ones_like(weights_BT)), sums


def _log_sum(log_ratio_BT: Tensor) -> Tensor:
    """[B, 1] log of the product over a completion, in float64: padding must not show in its rounding."""
    return log_ratio_BT.double().sum(dim=1, keepdim=True)


def _masked(weights_BT: Tensor, statistic_BT: Tensor, loss_mask_BT: Tensor, low: float, high: float) -> Weights:
    # Written so that NaN counts as inside: it must reach the loss, which stops the run.
    is_outside_BT = (statistic_BT < low) | (statistic_BT > high)
    return torch.where(is_outside_BT, 0.0, weights_BT).float(), loss_mask_BT & is_outside_BT
