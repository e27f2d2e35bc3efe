"""Which rollout a step trains on: the one it samples itself, or the one before it did."""

from collections.abc import Callable
from typing import Protocol

from colo.types import Rollout

Sample = Callable[[int], Rollout]
"""Samples, with the engine's present weights, the rollout that the given step will train on."""


class Schedule(Protocol):
    """Holds what is sampled and not trained on yet."""

    pending: Rollout | None

    def rollout(self, step: int, sample: Sample) -> Rollout:
        """What `step` trains on."""
        ...


class OnPolicy:
    """Each step trains on its own rollout."""

    pending: Rollout | None = None

    def rollout(self, step: int, sample: Sample) -> Rollout:
        """Sampled now."""
        return sample(step)


class OneOff:
    """Each step trains on what the step before it sampled, and samples what the next one trains on.

    The first step of a run has nothing pending: it samples its own rollout too, and is not stale. The last one samples
    nothing; a run that is made longer later starts like a first step there.
    """

    def __init__(self, num_steps: int) -> None:
        self.pending: Rollout | None = None
        self._num_steps = num_steps

    def rollout(self, step: int, sample: Sample) -> Rollout:
        """The pending one, from the weights before the last step's updates."""
        rollout = sample(step) if self.pending is None else self.pending
        assert step - rollout.first_step in (0, 1), f"step {step} must not train on step {rollout.first_step}'s rollout"
        self.pending = sample(step + 1) if step + 1 < self._num_steps else None
        return rollout
