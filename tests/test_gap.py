"""The gap between the policy's and the engine's logprobs, worked by hand."""

import math

import pytest
import torch

from colo.rl.gap import MAX_NAME, SUM_NAMES, gap_metrics, gap_sums


def test_numbers_worked_by_hand() -> None:
    policy_BT = torch.tensor([[math.nan, -1.0, -2.0], [-0.5, -1.5, -9.0]])
    engine_BT = torch.tensor([[0.0, -1.5, -1.0], [math.inf, -1.5, 0.0]])
    mask_BT = torch.tensor([[False, True, True], [False, True, False]])  # gaps 0.5, -1, 0
    sums = {name: value.item() for name, value in gap_sums(policy_BT, engine_BT, mask_BT).items()}
    metrics = gap_metrics(sums)
    assert metrics["gap/mean"] == pytest.approx(-0.5 / 3)
    assert metrics["gap/mean_abs"] == pytest.approx(1.5 / 3)
    assert metrics["gap/max_abs"] == 1.0
    # exp(0.5) - 1.5 = 0.148721, exp(-1) - 1 + 1 = 0.367879, 0
    assert metrics["gap/kl"] == pytest.approx((0.148721 + 0.367879) / 3, abs=1e-6)


def test_cut_up_and_reduced_gives_the_same_as_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    policy_BT, engine_BT = torch.randn(2, 6, 5, generator=generator).unbind()
    mask_BT = torch.rand(6, 5, generator=generator) < 0.6
    whole = {name: value.item() for name, value in gap_sums(policy_BT, engine_BT, mask_BT).items()}
    parts = [
        gap_sums(policy_BT[rows], engine_BT[rows], mask_BT[rows]) for rows in (slice(0, 1), slice(1, 6), slice(6, 6))
    ]
    added = {name: sum(part[name].item() for part in parts) for name in SUM_NAMES}
    added[MAX_NAME] = max(part[MAX_NAME].item() for part in parts)
    assert set(whole) == set(added)
    assert gap_metrics(added) == pytest.approx(gap_metrics(whole))


def test_the_kl_estimate_is_that_of_the_engine_to_the_policy() -> None:
    engine_V, policy_V = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    counts = [7000, 2000, 1000]  # as the engine would sample
    tokens = torch.cat([torch.full((count,), token) for token, count in enumerate(counts)])[None]
    sums = gap_sums(policy_V.log()[tokens], engine_V.log()[tokens], torch.ones_like(tokens, dtype=torch.bool))
    kl = (engine_V * (engine_V / policy_V).log()).sum().item()
    assert gap_metrics({name: value.item() for name, value in sums.items()})["gap/kl"] == pytest.approx(kl, rel=1e-5)


def test_without_tokens_there_is_no_gap_rather_than_a_gap_of_zero() -> None:
    empty = gap_sums(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.bool))
    assert gap_metrics({name: value.item() for name, value in empty.items()}) == {}
