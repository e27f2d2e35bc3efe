"""Group advantages: how much better a completion did than the others of its prompt.

Each function takes and returns [P, G] float32, one row per prompt. A group whose rewards are all equal
says nothing about what to do better: its advantages are exactly 0, never rounding noise and never NaN.
"""

import torch
from torch import Tensor

STD_EPS = 1e-4
"""Added to the standard deviation that GRPO divides by, in units of reward."""


def grpo_advantages(rewards_PG: Tensor) -> Tensor:
    """Center each group on its mean and divide by its sample standard deviation (+ 1e-4).

    Example: [1, 0, 0, 1] gives [0.86588, -0.86588, -0.86588, 0.86588].

    Raises:
        ValueError: G < 2; a group of one has no baseline.

    Source: GRPO, arxiv.org/abs/2402.03300, section 4.1.2.
    """
    centered_PG = dr_grpo_advantages(rewards_PG)
    return centered_PG / (rewards_PG.std(dim=1, correction=1, keepdim=True) + STD_EPS)


def dr_grpo_advantages(rewards_PG: Tensor) -> Tensor:
    """Center each group on its mean; without GRPO's division, which favours prompts of low variance.

    Example: [1, 0, 0, 1] gives [0.5, -0.5, -0.5, 0.5].

    Raises:
        ValueError: G < 2; a group of one has no baseline.

    Source: Dr. GRPO, arxiv.org/abs/2503.20783.
    """
    if rewards_PG.shape[1] < 2:
        raise ValueError(f"rollout.group_size must be at least 2, got {rewards_PG.shape[1]}")
    centered_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)
    # The mean of equal numbers can round to a neighbour of theirs.
    is_equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(dim=1, keepdim=True)
    return torch.where(is_equal_P1, torch.zeros_like(centered_PG), centered_PG)


def rloo_advantages(rewards_PG: Tensor) -> Tensor:
    """Subtract from each reward the mean of the others in its group: r - (sum - r) / (G - 1).

    Example: [1, 0, 0, 1] gives [0.66667, -0.66667, -0.66667, 0.66667].

    Raises:
        ValueError: G < 2; a group of one has no others.

    Source: RLOO, arxiv.org/abs/2402.14740. It equals G / (G - 1) times (r - mean).
    """
    num_completions = rewards_PG.shape[1]
    centered_PG = dr_grpo_advantages(rewards_PG)
    return centered_PG * (num_completions / (num_completions - 1))
