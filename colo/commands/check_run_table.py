"""What `colo check run` makes of what it saw: a row for each claim. Pure: no engine, no policy."""

import statistics
from dataclasses import dataclass

MAX_GROWTH = 1.5
"""The gap's mean over the second half of the steps, as a multiple of that over the first, that still counts as flat."""
MAX_JUMP = 2.0
"""The gap after a step of learning, as a multiple of the mean before it, that still counts as alike."""
ROUNDING = 1e-6
"""Nats; below it a gap is rounding, and its growth says nothing."""
OK, FAILED, NOT_TESTABLE = "ok", "FAILED", "not testable"
NO_TOKEN = "no token trained"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    verdict: str
    """OK, FAILED, or NOT_TESTABLE: with this recipe the line cannot fail."""
    seen: str


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What one step showed, over all ranks."""

    policy: str
    """A digest of the policy's weights, before the step's update."""
    engine: str
    """A digest of the engines' weights, as proven after the reload."""
    tokens: list[list[list[int]]]
    """Each rank's greedy completions of the probes."""
    num_cached: int
    """The most cached prompt tokens of a rank's first request after the reload."""
    num_cached_again: int
    """The fewest of the same request, given again."""
    gap: float | None
    """Mean absolute gap, in nats; None where no token trained."""
    first_step: int
    """In which the first of the tokens that trained was sampled."""
    is_rewarded: bool
    """Whether rewards differed within a group."""


def judge(sights: list[Sight], num_steps: int) -> list[Row]:
    """The rows for what was seen: `num_steps` steps that did not learn, then perhaps one that did and some more."""
    still, after = sights[: num_steps + 1], sights[num_steps + 1 :]  # the step that learns began with the same weights
    gaps = [sight.gap for sight in still if sight.gap is not None]
    rows = []
    if len(still) > 1:
        rows = [
            _same("policy weights, learning rate 0", [sight.policy for sight in still]),
            _same("engine weights, as proven", [sight.engine for sight in still]),
            _same("greedy tokens", [str(sight.tokens) for sight in still]),
            _flat(gaps),
        ]
    if sights:
        rows.append(_uncached(sights))
    if after:
        rows.append(_moved(still, after[0]))
        rows += [_alike(gaps, sight.gap) for sight in after if sight.first_step > num_steps]  # of the new weights
    return rows


def _row(name: str, seen: str, *, is_ok: bool) -> Row:
    return Row(name=name, verdict=OK if is_ok else FAILED, seen=seen)


def _same(name: str, digests: list[str]) -> Row:
    differ = [str(step) for step, digest in enumerate(digests) if digest != digests[0]]
    seen = f"others than at step 0 at step {', '.join(differ)}" if differ else f"equal over {len(digests)} steps"
    return _row(name, seen, is_ok=not differ)


def _flat(gaps: list[float]) -> Row:
    name, half = "gap, flat", len(gaps) // 2
    if not half:
        return Row(name=name, verdict=NOT_TESTABLE, seen=f"{NO_TOKEN}, but in {len(gaps)} steps")
    first, second = statistics.mean(gaps[:half]), statistics.mean(gaps[half:])
    seen = f"{first:.3g} nats in the first half, {second:.3g} in the second"
    return _row(name, seen, is_ok=second <= MAX_GROWTH * first + ROUNDING)


def _uncached(sights: list[Sight]) -> Row:
    name = "cached tokens"
    cached, again = max(sight.num_cached for sight in sights), min(sight.num_cached_again for sight in sights)
    if not cached and not again:
        seen = "a prompt, given twice, reads none: no prefix cache, or no whole block fits engine.vllm.max_model_len"
        return Row(name=name, verdict=NOT_TESTABLE, seen=seen)
    seen = f"{cached} in the first request after each reload, {again} in the same one again"
    return _row(name, seen, is_ok=not cached)


def _moved(still: list[Sight], after: Sight) -> Row:
    name, last = "a step that learns", still[-1]
    if after.policy != last.policy and after.engine != last.engine:
        return _row(name, "policy and engine changed", is_ok=True)
    seen = "the weights did not change"
    if last.gap is None:
        seen += f": {NO_TOKEN}"
    elif not any(sight.is_rewarded for sight in still):
        seen += ": no reward differed in any group"
    return _row(name, seen, is_ok=False)


def _alike(before: list[float], gap: float | None) -> Row:
    name = "gap after it"
    if not before or gap is None:
        return Row(name=name, verdict=NOT_TESTABLE, seen=NO_TOKEN)
    mean = statistics.mean(before)
    return _row(name, f"{gap:.3g} nats, {mean:.3g} before", is_ok=gap <= MAX_JUMP * mean + ROUNDING)


def table(rows: list[Row]) -> str:
    """The rows for a person to read."""
    first, width = (max(map(len, words)) for words in ([row.verdict for row in rows], [row.name for row in rows]))
    return "".join(f"{row.verdict:<{first}}  {row.name:<{width}}  {row.seen}\n" for row in rows)
