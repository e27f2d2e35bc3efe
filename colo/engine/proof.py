"""The proof: sums over what the engine holds, against sums over what the policy handed over."""

import numpy as np
import torch
from torch import Tensor

from colo.engine.checksum import ChecksumTable
from colo.engine.plan import ReloadPlan
from colo.engine.strided import Strided

MAX_NAMED = 5


class EngineSums:
    """Sums over the storage of this rank's engine, by region: each copy, each fill and each kept tensor of its plan."""

    def __init__(self, plan: ReloadPlan, targets: dict[str, Tensor]) -> None:
        """The kept tensors' present values are those to keep."""
        self._num_copies = len(plan.copies)
        regions = [(write.target, write.places) for write in [*plan.copies, *plan.fills]]
        regions += [(name, whole(targets[name])) for name in plan.kept]
        self.names = [f"{copy.target} (from {copy.source})" for copy in plan.copies]
        self.names += [f"{fill.target} (filled with {fill.value:g})" for fill in plan.fills]
        self.names += [f"{name} (kept)" for name in plan.kept]
        self.targets = [name for name, _ in regions]
        """The engine tensor of each region."""
        self._table = ChecksumTable(
            [(places.view_of(targets[name]), places, targets[name].dtype) for name, places in regions]
        )
        constants = [
            (_constant(fill.value, targets[fill.target], fill.places), fill.places, targets[fill.target].dtype)
            for fill in plan.fills
        ]
        self._fills = ChecksumTable(constants).run().cpu().numpy()
        self.keep_as_is()

    def now(self) -> np.ndarray:
        """[num_regions] int64."""
        return self._table.run().cpu().numpy()

    def keep_as_is(self) -> None:
        """Take the kept tensors' present values for those to keep."""
        self._others = np.concatenate([self._fills, self.now()[self._num_copies + len(self._fills) :]])

    def differing(self, copies: np.ndarray, skipped: set[str]) -> tuple[np.ndarray, list[str]]:
        """Compare the engine with what it must hold.

        Args:
            copies: [num_copies] int64, the sums over the policy's tensors; fills and kept tensors are known here.
            skipped: Engine tensors that are not looked at.

        Returns:
            The engine's sums, and the names of the regions where they are others.
        """
        held = self.now()
        wrong = np.flatnonzero(held != np.concatenate([copies, self._others]))
        return held, [self.names[number] for number in wrong if self.targets[number] not in skipped]


def whole_sums(targets: dict[str, Tensor]) -> dict[str, int]:
    """The sum of each engine tensor, by name."""
    table = ChecksumTable([(tensor, whole(tensor), tensor.dtype) for tensor in targets.values()])
    return dict(zip(targets, table.run().tolist(), strict=True))


def whole(tensor: Tensor) -> Strided:
    """Every place of a tensor, counted from its first element."""
    return Strided(0, tuple(tensor.shape), tuple(tensor.stride()))


def shorten(names: list[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _constant(value: float, target: Tensor, places: Strided) -> Tensor:
    return torch.full((), value, dtype=target.dtype, device=target.device).expand(places.shape)
