"""The gap between the policy's and the engine's logprobs, worked by hand."""

import json
import math
import pickle

import pytest
import torch
from torch import Tensor

from colo.rl.gap import GapSums, GapTotals, GapTrend, gap_above, gap_metrics
from colo.types import MicroBatch


def totals(
    policy_BT: Tensor, engine_BT: Tensor, mask_BT: Tensor, ages_BT: Tensor | None = None, *cuts: slice
) -> GapTotals:
    """One rank's, of rows that come whole or as these micro-batches."""
    sums = GapSums()
    ages_BT = torch.zeros_like(mask_BT, dtype=torch.int32) if ages_BT is None else ages_BT
    for rows in cuts or (slice(None),):
        batch = MicroBatch(
            token_ids_BT=torch.zeros_like(mask_BT[rows], dtype=torch.int64),
            loss_mask_BT=mask_BT[rows],
            engine_logprobs_BT=engine_BT[rows],
            ages_BT=ages_BT[rows],
            advantages_B=torch.zeros(len(mask_BT[rows])),
        )
        sums.add(policy_BT[rows], batch)
    return sums.totals()


def of_gaps(gaps: list[float], ages: list[int] | None = None) -> GapTotals:
    """One rank whose loss tokens have these gaps."""
    policy_BT = torch.tensor([gaps], dtype=torch.float64)
    ages_BT = None if ages is None else torch.tensor([ages], dtype=torch.int32)
    return totals(policy_BT, torch.zeros_like(policy_BT), torch.ones_like(policy_BT, dtype=torch.bool), ages_BT)


def test_numbers_worked_by_hand() -> None:
    policy_BT = torch.tensor([[math.nan, -1.0, -2.0], [-0.5, -1.5, -9.0]])
    engine_BT = torch.tensor([[0.0, -1.5, -1.0], [math.inf, -1.5, 0.0]])
    mask_BT = torch.tensor([[False, True, True], [False, True, False]])  # gaps 0.5, -1, 0
    metrics = gap_metrics([totals(policy_BT, engine_BT, mask_BT)])
    assert metrics == {
        "gap/mean": pytest.approx(-0.5 / 3),
        "gap/mean_abs": pytest.approx(1.5 / 3),
        "gap/max_abs": 1.0,
        "gap/p50_abs": pytest.approx(0.5, rel=0.011),
        "gap/p99_abs": 1.0,
        # exp(0.5) - 1.5 = 0.148721, exp(-1) - 1 + 1 = 0.367879, 0
        "gap/kl": pytest.approx((0.148721 + 0.367879) / 3, abs=1e-6),
        "gap/ratio_mean": pytest.approx((1.648721 + 0.367879 + 1) / 3, abs=1e-6),
    }


def test_by_age_worked_by_hand() -> None:
    metrics = gap_metrics([of_gaps([0.5, -1.0, 0.25], [0, 2, 2]), of_gaps([0.75], [2]), of_gaps([])])
    by_age = {name: value for name, value in metrics.items() if "/age_" in name}
    assert by_age == {
        "gap/age_0/mean": 0.5,
        "gap/age_0/mean_abs": 0.5,
        "gap/age_0/max_abs": 0.5,
        "gap/age_0/p50_abs": 0.5,  # the bin's middle is above the largest
        "gap/age_0/p99_abs": 0.5,
        "gap/age_0/kl": pytest.approx(0.148721, abs=1e-6),
        "gap/age_0/ratio_mean": pytest.approx(1.648721, abs=1e-6),
        "gap/age_0/num_tokens": 1,
        "gap/age_2/mean": 0.0,
        "gap/age_2/mean_abs": pytest.approx(2 / 3),
        "gap/age_2/max_abs": 1.0,
        "gap/age_2/p50_abs": pytest.approx(0.75, rel=0.011),
        "gap/age_2/p99_abs": 1.0,
        # exp(-1), exp(0.25) - 1.25 = 0.034025, exp(0.75) - 1.75 = 0.367
        "gap/age_2/kl": pytest.approx((0.367879 + 0.034025 + 0.367000) / 3, abs=1e-6),
        "gap/age_2/ratio_mean": pytest.approx((0.367879 + 1.284025 + 2.117000) / 3, abs=1e-6),
        "gap/age_2/num_tokens": 3,
    }
    assert metrics["gap/mean_abs"] == pytest.approx(2.5 / 4)
    assert metrics["gap/max_abs"] == 1.0


def test_an_age_is_told_as_it_would_be_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    gaps = [(0.1 * torch.randn(200, generator=generator).double()).tolist() for _ in range(3)]
    alone = [gap_metrics([of_gaps(of_age)]) for of_age in gaps]
    ages = [age for age, of_age in enumerate(gaps) for _ in of_age]
    together = gap_metrics([of_gaps([gap for of_age in gaps for gap in of_age], ages)])
    for age, metrics in enumerate(alone):
        of_age = {name.replace("gap/", f"gap/age_{age}/"): value for name, value in metrics.items()}
        assert of_age.items() <= together.items()


def test_ages_are_told_unless_all_tokens_are_of_the_present_weights() -> None:
    assert not [name for name in gap_metrics([of_gaps([0.5, 1.0], [0, 0])]) if "/age_" in name]
    assert gap_metrics([of_gaps([0.5, 1.0], [1, 1])])["gap/age_1/mean_abs"] == 0.75


def test_cut_up_over_micro_batches_and_ranks_gives_the_same_as_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    policy_BT, engine_BT = torch.randn(2, 6, 5, generator=generator).unbind()
    mask_BT = torch.rand(6, 5, generator=generator) < 0.6
    ages_BT = torch.randint(0, 3, (6, 5), generator=generator, dtype=torch.int32)
    whole = gap_metrics([totals(policy_BT, engine_BT, mask_BT, ages_BT)])
    assert len(whole) == 7 + 3 * 8
    cuts = slice(0, 1), slice(1, 6), slice(6, 6)
    assert gap_metrics([totals(policy_BT, engine_BT, mask_BT, ages_BT, *cuts)]) == pytest.approx(whole)
    ranks = [totals(policy_BT[rows], engine_BT[rows], mask_BT[rows], ages_BT[rows]) for rows in cuts]
    assert gap_metrics(pickle.loads(pickle.dumps(ranks))) == pytest.approx(whole)


def test_percentiles_are_those_of_all_ranks_within_a_bin() -> None:
    generator = torch.Generator().manual_seed(0)
    gaps = torch.exp(3 * torch.randn(5000, generator=generator) - 6).double()  # over nine orders of magnitude
    metrics = gap_metrics([of_gaps(gaps[:400].tolist()), of_gaps((-gaps[400:]).tolist())])
    for name, share in (("gap/p50_abs", 0.50), ("gap/p99_abs", 0.99)):
        exact = gaps.sort().values[math.ceil(share * 5000) - 1].item()
        assert metrics[name] == pytest.approx(exact, rel=0.011)
    assert metrics["gap/p99_abs"] <= metrics["gap/max_abs"]


def test_equal_logprobs_have_a_gap_of_exactly_zero() -> None:
    metrics = gap_metrics([of_gaps([0.0] * 4)])
    assert metrics.pop("gap/ratio_mean") == 1
    assert set(metrics.values()) == {0}


def test_the_kl_estimate_is_that_of_the_engine_to_the_policy() -> None:
    engine_V, policy_V = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    counts = [7000, 2000, 1000]  # as the engine would sample
    tokens = torch.cat([torch.full((count,), token) for token, count in enumerate(counts)])[None]
    mask_BT = torch.ones_like(tokens, dtype=torch.bool)
    metrics = gap_metrics([totals(policy_V.log()[tokens], engine_V.log()[tokens], mask_BT)])
    kl = (engine_V * (engine_V / policy_V).log()).sum().item()
    assert metrics["gap/kl"] == pytest.approx(kl, rel=1e-5)
    assert metrics["gap/ratio_mean"] == pytest.approx(1, rel=1e-5)


def test_without_tokens_there_is_no_gap_rather_than_a_gap_of_zero() -> None:
    assert gap_metrics([of_gaps([]), of_gaps([])]) == {}
    assert gap_above({}, "gap.stop", 0.1) == ""


def test_a_limit_is_told_with_the_steps_values_and_nan_is_above_it() -> None:
    metrics = {"gap/mean_abs": 0.25, "gap/kl": 0.125}
    assert gap_above(metrics, "gap.stop", 0.2) == "gap/mean_abs must be at most gap.stop 0.2, got 0.25 (gap/kl 0.125)"
    assert gap_above(metrics, "gap.stop", 0.25) == ""
    assert gap_above(metrics, "gap.stop", 0.0) == "", "0 is off"
    aged = metrics | {"gap/age_1/kl": 0.5, "gap/age_1/mean_abs": 0.25, "gap/age_1/num_tokens": 3.0}
    assert gap_above(aged, "gap.stop", 0.2).endswith("(gap/kl 0.125, gap/age_1/mean_abs 0.25, gap/age_1/num_tokens 3)")
    assert gap_above({"gap/mean_abs": math.nan}, "gap.stop", 0.2)


def test_a_gap_that_is_not_a_number_reaches_the_metrics() -> None:
    assert math.isnan(gap_metrics([of_gaps([math.nan, 0.5])])["gap/mean_abs"])
    assert gap_metrics([of_gaps([math.inf, 0.5])])["gap/mean_abs"] == math.inf


def trends(window: int, values: list[float]) -> list[float | None]:
    trend = GapTrend(window)
    return [trend.add(value) for value in values]


def test_the_trend_is_the_later_halfs_median_over_the_earlier_halfs() -> None:
    assert trends(4, [1.0, 3.0, 4.0, 8.0, 2.0]) == [None, None, None, 3.0, 5.0 / 3.5]
    assert trends(5, [1.0, 1.0, 50.0, 2.0, 2.0])[-1] == 2.0, "the middle one is in neither half"
    assert trends(6, [2.0] * 9)[5:] == [1.0] * 4
    assert trends(6, [0.1 * 1.5**step for step in range(9)])[5:] == pytest.approx([1.5**3] * 4)


def test_one_odd_step_is_no_trend() -> None:
    assert trends(6, [1.0, 1.0, 1.0, 1.0, 90.0, 1.0])[-1] == 1.0
    assert trends(6, [1.0, 90.0, 1.0, 1.0, 1.0, 1.0])[-1] == 1.0


def test_nothing_to_compare_with_is_no_trend() -> None:
    assert trends(4, [0.0, 0.0, 1.0, 1.0, 2.0]) == [None, None, None, None, 3.0]


def test_a_trend_goes_on_from_its_history_bit_for_bit() -> None:
    values = [0.1 / (3 + step) for step in range(12)]
    whole = trends(5, values)
    for cut in range(12):
        before = GapTrend(5)
        for value in values[:cut]:
            before.add(value)
        after = GapTrend(5, json.loads(json.dumps(before.history)))
        assert [after.add(value) for value in values[cut:]] == whole[cut:]
    assert GapTrend(3, values).history == values[-3:], "a shorter window keeps the newest"
