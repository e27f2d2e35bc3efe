"""The gap: the policy's logprob minus the engine's, of the same token under what should be the same weights.

It is 0 where both compute the same distribution, rounding aside; weights that differ, or a temperature applied
on one side only, show up here first. Weights that are some updates old show as a gap by the token's age, and
weights that stay old as a gap that grows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from colo.rl.losses import k3
from colo.types import MicroBatch

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)
BINS_PER_OCTAVE = 32
"""Of the histogram of |gap|: a bin's upper edge is 2.2 % above its lower, so its middle is within 1.1 % of what is
in it."""
LOWEST_BIN, HIGHEST_BIN = -30 * BINS_PER_OCTAVE, 10 * BINS_PER_OCTAVE
"""From 2^-30, below which a gap counts as 0, to 2^10 nats, where a probability ratio is beyond a float64 already."""
NO_AGE = -1
"""Of what is no loss token."""
TOLD_BY_AGE = ("mean_abs", "num_tokens")
"""What an alarm says of each age."""


@dataclass(frozen=True, kw_only=True)
class AgeTotals:
    """One rank's gap over tokens of one age, in plain numbers."""

    sums: dict[str, float]
    """`num_tokens`, and sums over them of `gap`, `gap_abs`, `kl` (k3 of the gap) and `ratio`."""
    largest: float
    """The largest |gap|."""
    histogram: dict[int, int]
    """Tokens by the bin of their |gap|."""


@dataclass(frozen=True, kw_only=True)
class GapTotals:
    """One rank's gap, which adds up over ranks."""

    by_age: dict[int, AgeTotals]
    """Of the ages that occur among its loss tokens."""


class GapSums:
    """The gap of one rank's micro-batches; it stays on the device until `totals`."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def add(self, policy_logprobs_BT: Tensor, batch: MicroBatch) -> None:
        """Take in a micro-batch, without waiting for the device.

        Args:
            policy_logprobs_BT: [B, T] nats, before any optimizer step on this rollout.
            batch: Gives the engine's logprobs and the ages; what stands off its loss mask is not read.
        """
        gap_BT = policy_logprobs_BT.detach().double() - batch.engine_logprobs_BT.double()
        age_BT = torch.where(batch.loss_mask_BT, batch.ages_BT, NO_AGE)
        self._parts.append(torch.stack([gap_BT.flatten(), age_BT.flatten().double()]))

    def totals(self) -> GapTotals:
        """Sum over all loss tokens; waits for the device."""
        assert self._parts, "the gap must have seen a micro-batch, which may be without loss tokens"
        # Summed on the CPU: a float64 for each loss token is little, and its sums repeat bit for bit.
        gap, age = torch.cat(self._parts, dim=1).cpu()
        ages = age.unique().tolist()
        return GapTotals(by_age={int(number): _totals(gap[age == number]) for number in ages if number != NO_AGE})


def gap_metrics(totals: Sequence[GapTotals]) -> dict[str, float]:
    """Turn the totals of all ranks, in rank order, into metrics.

    Returns:
        In nats per loss token: `gap/mean`, `gap/mean_abs`, `gap/max_abs`, `gap/p50_abs` and `gap/p99_abs` (percentiles
        of |gap|, to 1.1 %), and `gap/kl`, the k3 estimate of KL(engine || policy). `gap/ratio_mean` is the mean
        probability ratio of policy to engine, 1 but for sampling noise where the engine sampled what it says. Where
        not all tokens have age 0, the same as `gap/age_N/...` for each age that occurs, with its `num_tokens`. Empty
        where no token trained: there is no gap to speak of, and 0 would claim there was.

    Source: k3, joschu.net/blog/kl-approx.html, with exp(gap) the ratio of policy to engine.
    """
    ages = sorted({age for row in totals for age in row.by_age})
    if not ages:
        return {}
    by_age = {age: _joined([row.by_age[age] for row in totals if age in row.by_age]) for age in ages}
    metrics = _metrics("gap", _joined(list(by_age.values())))
    if ages != [0]:
        for age, of_age in by_age.items():
            metrics |= _metrics(f"gap/age_{age}", of_age)
            metrics[f"gap/age_{age}/num_tokens"] = of_age.sums["num_tokens"]
    return metrics


def gap_above(metrics: Mapping[str, float], option: str, limit: float) -> str:
    """Say by how much `gap/mean_abs` is above the option's limit; empty where it is not, or the limit is 0, or no token
    trained.
    """
    mean_abs = metrics.get("gap/mean_abs", 0.0)
    if limit == 0 or mean_abs <= limit:
        return ""
    told = [name for name in metrics if "/age_" not in name or name.endswith(TOLD_BY_AGE)]
    others = ", ".join(f"{name} {metrics[name]:.4g}" for name in told if name != "gap/mean_abs")
    return f"gap/mean_abs must be at most {option} {limit}, got {mean_abs} ({others})"


class GapTrend:
    """How `gap/mean_abs` moves over the last steps: 1 is flat, 2 says that it doubled between the window's halves.

    A ratio of medians, since one odd step among several should neither look like growth nor hide it (the breakdown
    point of a median is one half), and a ratio, since a gap of float32 and one of bfloat16 differ by orders of
    magnitude while what is stale grows in both.
    """

    def __init__(self, window: int, history: Sequence[float] = ()) -> None:
        """Go on from `history`, oldest first; of a longer one the newest count."""
        self._window = window
        self.history = list(history)[-window:]
        """The last `window` values at most, oldest first: all that a resume needs."""

    def add(self, mean_abs: float) -> float | None:
        """Take in a step's `gap/mean_abs`.

        Returns:
            `gap/trend`; None before `window` steps, and where the earlier half's median is 0.
        """
        self.history = [*self.history, mean_abs][-self._window :]
        half = self._window // 2  # of an odd number the middle one is in neither
        earlier = median(self.history[:half])
        if len(self.history) < self._window or earlier == 0:
            return None
        return median(self.history[-half:]) / earlier


def _totals(gap: Tensor) -> AgeTotals:
    """Of at least one token."""
    bins, counts = _bins(gap.abs()).unique(return_counts=True)
    return AgeTotals(
        sums={
            "num_tokens": float(gap.numel()),
            "gap": gap.sum().item(),
            "gap_abs": gap.abs().sum().item(),
            "kl": k3(gap).sum().item(),
            "ratio": gap.exp().sum().item(),
        },
        largest=gap.abs().max().item(),
        histogram=dict(zip(bins.tolist(), counts.tolist(), strict=True)),
    )


def _joined(parts: Sequence[AgeTotals]) -> AgeTotals:
    return AgeTotals(
        sums=_added([part.sums for part in parts]),
        largest=max(part.largest for part in parts),
        histogram=_added([part.histogram for part in parts]),
    )


def _metrics(area: str, totals: AgeTotals) -> dict[str, float]:
    num_tokens, largest = totals.sums["num_tokens"], totals.largest
    return {
        f"{area}/mean": totals.sums["gap"] / num_tokens,
        f"{area}/mean_abs": totals.sums["gap_abs"] / num_tokens,
        f"{area}/max_abs": largest,
        f"{area}/p50_abs": min(largest, _percentile(totals.histogram, 0.50)),
        f"{area}/p99_abs": min(largest, _percentile(totals.histogram, 0.99)),
        f"{area}/kl": totals.sums["kl"] / num_tokens,
        f"{area}/ratio_mean": totals.sums["ratio"] / num_tokens,
    }


def _added(rows: Sequence[dict[Key, Number]]) -> dict[Key, Number]:
    """Sums by key, in the order of the rows."""
    added: dict[Key, Number] = {}
    for row in rows:
        for key, value in row.items():
            added[key] = added[key] + value if key in added else value
    return added


def _bins(gap_abs: Tensor) -> Tensor:
    """Bin k holds [2^(k / BINS_PER_OCTAVE), 2^((k + 1) / BINS_PER_OCTAVE)); the lowest and what is below are 0."""
    bins = torch.log2(gap_abs).mul(BINS_PER_OCTAVE).floor()
    # NaN goes to the top: it has no bin, and the sums show it.
    return bins.nan_to_num(nan=HIGHEST_BIN).clamp(LOWEST_BIN, HIGHEST_BIN).long()


def _percentile(histogram: dict[int, int], share: float) -> float:
    """The geometric middle of the bin that holds the smallest value with `share` of all at or below it."""
    needed, seen = math.ceil(share * sum(histogram.values())), 0
    for index in sorted(histogram):
        seen += histogram[index]
        if seen >= needed:
            return 0.0 if index == LOWEST_BIN else 2.0 ** ((index + 0.5) / BINS_PER_OCTAVE)
    raise AssertionError("a percentile must be of at least one value")
