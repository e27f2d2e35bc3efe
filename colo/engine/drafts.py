"""Speculative drafts: what of them is kept over a sleep, and whether their tokens are still accepted.

A draft whose weights were lost changes no output: the engine refuses every one of its tokens and is only slower. So
what is watched is acceptance, from vLLM's own counters.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import filter as matching
from typing import Any, Protocol

from torch import nn

from colo.config import EngineConfig
from colo.ranks import Ranks
from colo.types import Sampling

logger = logging.getLogger(__name__)
DRAFT = "draft."
"""Before a draft's parameter names, where they stand beside the target's: vLLM's own prefix."""
COUNTERS = "vllm:spec_decode_"
NEWEST_SHARE = 0.2
"""Weight of the newest phase in the running mean."""
MIN_DRAFT_TOKENS = 64
"""A phase with fewer draft tokens says too little to be part of the running mean."""
MIN_EXPECTED = 16
"""Fewer are missed by chance: judged is a phase of which the mean lets expect this many accepted tokens."""
LEAST_ACCEPTANCE = 1 / 64
"""Where there is no mean yet: a draft that does worse is of no use."""


def kept_patterns(config: EngineConfig) -> list[str]:
    """The globs over parameter names that a sleep at depth 2 keeps: the user's, and a draft's own parameters.

    Without them a level-2 sleep drops a draft, and no reload brings it back: github.com/vllm-project/vllm/issues/52479.
    """
    patterns = list(config.vllm.get("sleep_preserve_parameter_names", []))
    return [*patterns, f"{DRAFT}*"] if config.speculative and f"{DRAFT}*" not in patterns else patterns


def kept_parameters(model: nn.Module, draft: nn.Module | None, patterns: list[str]) -> dict[str, nn.Parameter]:
    """The parameters that the globs match, by name, a draft's own ones under `draft.`.

    A parameter that target and draft share is the target's: it comes back with the reload.

    Raises:
        ValueError: a glob matches nothing; vLLM would say so at the first sleep. `draft.*` may: some drafts have no
            weights.
    """
    parameters = dict(model.named_parameters())
    shared = {id(parameter) for parameter in parameters.values()}
    if draft is not None:
        own = [(name, parameter) for name, parameter in draft.named_parameters() if id(parameter) not in shared]
        parameters |= {f"{DRAFT}{name}": parameter for name, parameter in own}
    kept: dict[str, nn.Parameter] = {}
    for pattern in patterns:
        names = matching(parameters, pattern)
        if not names and pattern != f"{DRAFT}*":
            raise ValueError(
                f"engine.vllm.sleep_preserve_parameter_names must match a parameter each, got {pattern!r} that does not"
            )
        kept |= {name: parameters[name] for name in names}
    return kept


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """How many tokens were drafted, and how many of them the target accepted.

    Example: DraftCounts(num_drafts=10, num_draft_tokens=30, num_accepted_tokens=12, num_accepted_by_position=(7, 4, 1))
    """

    num_drafts: int = 0
    """Times that a draft was made; each has up to num_speculative_tokens tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: tuple[int, ...] = ()
    """By the token's place in its draft, from 0."""

    def since(self, earlier: "DraftCounts") -> "DraftCounts":
        """What was counted after `earlier`."""
        before = earlier.num_accepted_by_position or (0,) * len(self.num_accepted_by_position)
        return DraftCounts(
            num_drafts=self.num_drafts - earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens - earlier.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens - earlier.num_accepted_tokens,
            num_accepted_by_position=tuple(
                now - then for now, then in zip(self.num_accepted_by_position, before, strict=True)
            ),
        )

    @property
    def acceptance(self) -> float:
        """Accepted tokens per draft token; there must be one."""
        return self.num_accepted_tokens / self.num_draft_tokens

    def metrics(self) -> dict[str, float]:
        """By metric name; where nothing was drafted there are no shares.

        `draft/mean_length` counts the target's own token, which follows the accepted ones. `draft/acceptance_pos_N` is
        the share of drafts whose token N, from 0, was accepted.
        """
        if not self.num_draft_tokens:
            return {"draft/num_draft_tokens": 0.0}
        return {
            "draft/acceptance": self.acceptance,
            "draft/num_draft_tokens": float(self.num_draft_tokens),
            "draft/mean_length": 1 + self.num_accepted_tokens / self.num_drafts,
        } | {
            f"draft/acceptance_pos_{position}": accepted / self.num_drafts
            for position, accepted in enumerate(self.num_accepted_by_position)
        }


def sum_counts(counts: Iterable[DraftCounts]) -> DraftCounts:
    """The counts of several engines together."""
    rows = list(counts)
    return DraftCounts(
        num_drafts=sum(row.num_drafts for row in rows),
        num_draft_tokens=sum(row.num_draft_tokens for row in rows),
        num_accepted_tokens=sum(row.num_accepted_tokens for row in rows),
        num_accepted_by_position=tuple(
            sum(column) for column in zip(*(row.num_accepted_by_position for row in rows), strict=True)
        ),
    )


class AcceptanceFloor:
    """Holds each phase's acceptance against the mean of those before it. Pure: numbers in, judgement out."""

    def __init__(self, floor: float, *, has_weights: bool) -> None:
        """Start without a mean: the first phase has nothing to be held against.

        Args:
            floor: Share of the running mean below which an acceptance is an alarm, in [0, 1].
            has_weights: Whether there are weights that can be lost; a draft that looks tokens up (ngram) has none, and
                may find nothing that fits.
        """
        self.mean: float | None = None
        self._floor = floor
        self._has_weights = has_weights
        self._num_in_vain = 0  # draft tokens since one was accepted, over phases

    def judge(self, counts: DraftCounts) -> str:
        """What is wrong with a phase's counts, empty where nothing is.

        A phase that alarms is left out of the mean, so that a draft that stays lost stays an alarm.

        Raises:
            RuntimeError: none of a draft's tokens was accepted, and of weights as they were some would have been.
        """
        num_drafted, num_accepted = counts.num_draft_tokens, counts.num_accepted_tokens
        self._num_in_vain = 0 if num_accepted else self._num_in_vain + num_drafted
        usual = LEAST_ACCEPTANCE if self.mean is None else self.mean
        if self._has_weights and self._num_in_vain >= max(MIN_DRAFT_TOKENS, MIN_EXPECTED / usual):
            raise RuntimeError(
                f"drafts: none of {self._num_in_vain} draft tokens was accepted: the draft's weights are lost or stale"
            )
        if self.mean is not None and usual * num_drafted >= MIN_EXPECTED and counts.acceptance < self._floor * usual:
            look_at = (
                "the draft's weights are lost or stale"
                if self._has_weights
                else "the completions repeat less of what came before"
            )
            return (
                f"drafts: acceptance {counts.acceptance:.3f} is below engine.draft_floor {self._floor:g} x its running "
                f"mean {self.mean:.3f}: {look_at}"
            )
        if num_drafted >= MIN_DRAFT_TOKENS and num_accepted:
            newest = counts.acceptance
            self.mean = newest if self.mean is None else self.mean + NEWEST_SHARE * (newest - self.mean)
        return ""


Way = tuple[float, float, int]
"""Temperature, top-p and top-k, which acceptance depends on."""


class CountsDrafts(Protocol):
    """What is asked of vLLM's `LLM`."""

    def get_metrics(self) -> list[Any]:
        """Its counters, cumulative since the build."""
        ...


def read_counts(llm: CountsDrafts) -> DraftCounts:
    """vLLM's counters as they stand; it must have been built with disable_log_stats=False."""
    found = {metric.name.removeprefix(COUNTERS): metric for metric in llm.get_metrics() if COUNTERS in metric.name}
    return DraftCounts(
        num_drafts=found["num_drafts"].value,
        num_draft_tokens=found["num_draft_tokens"].value,
        num_accepted_tokens=found["num_accepted_tokens"].value,
        num_accepted_by_position=tuple(found["num_accepted_tokens_per_pos"].values),
    )


class DraftWatch:
    """Acceptance of one engine's drafts, phase by phase; equal on all ranks. Its means start anew with the process.

    Each way of sampling has a mean of its own: greedy tokens are accepted far more often than drawn ones. So has each
    set of ways that were in flight together, since vLLM counts their drafts as one.
    """

    def __init__(self, llm: CountsDrafts, floor: float, *, has_weights: bool) -> None:
        """Watch `llm`; `floor` and `has_weights` as for `AcceptanceFloor`."""
        self._llm = llm
        self._floor, self._has_weights = floor, has_weights
        self._floors: dict[frozenset[Way], AcceptanceFloor] = {}
        self._counts: dict[frozenset[Way], DraftCounts] = {}
        self._before = DraftCounts()
        self._ways: frozenset[Way] = frozenset()
        """Of what is in flight; of what was last in flight where nothing is."""

    def start(self) -> None:
        """A phase begins: after a wake, before it generates."""
        self._before, self._counts = read_counts(self._llm), {}

    def submit(self, sampling: Sampling, *, num_in_flight: int) -> None:
        """A request is about to be submitted, beside others that are in flight."""
        way = (sampling.temperature, sampling.top_p, sampling.top_k)
        ways = self._ways | {way} if num_in_flight else frozenset({way})
        if ways != self._ways:
            self._count()
            self._ways = ways

    def _count(self) -> None:
        """What was drafted since the last count, or the start, was for the ways in flight."""
        now = read_counts(self._llm)
        counted = [self._counts[self._ways]] if self._ways in self._counts else []
        self._counts[self._ways] = sum_counts([*counted, now.since(self._before)])
        self._before = now

    def finish(self, ranks: Ranks) -> dict[str, float]:
        """A phase ends: its metrics over all replicas, `draft/alarm` (0 or 1) among them. Collective.

        Raises:
            RuntimeError: on every rank: a draft with weights had none of its tokens accepted.
        """
        self._count()
        told = ranks.gather(self._counts, "counting accepted drafts")
        rows = told[:: ranks.tensor_parallel_size]  # the ranks of one engine count the same drafts
        totals = {}
        for ways in dict.fromkeys(ways for row in rows for ways in row):
            totals[ways] = sum_counts([row[ways] for row in rows if ways in row])
        wrong = []
        for ways, counts in totals.items():
            if ways not in self._floors:
                self._floors[ways] = AcceptanceFloor(self._floor, has_weights=self._has_weights)
            wrong += [self._floors[ways].judge(counts)]
        for said in filter(None, wrong):
            if ranks.is_main:
                logger.warning(said)
        return sum_counts(totals.values()).metrics() | {"draft/alarm": float(any(wrong))}
