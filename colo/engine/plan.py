"""What vLLM's own `load_weights` copies where: watched once over tensors without data, and checked."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colo.engine.strided import Strided, row_major, runs_of

logger = logging.getLogger(__name__)
aten = torch.ops.aten
SAME_VALUES = (aten.clone.default, aten._to_copy.default, aten.contiguous.default)
"""What only moves or casts a tensor: its result stands for its argument, since the copy casts anyway."""
FILLS = (aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One slice of a policy tensor and where it goes in the engine, element by element in one order."""

    target: str
    """The engine's name of the tensor that is written."""
    places: Strided
    """In the target, counted from its first element."""
    source: str
    """The checkpoint's name of the tensor that is read."""
    read: Strided
    """In the whole source, in row-major order."""


@dataclass(frozen=True, kw_only=True)
class Fill:
    """A part of an engine tensor that is a constant, such as the padding of the vocabulary."""

    target: str
    places: Strided
    value: float


@dataclass(kw_only=True)
class ReloadPlan:
    """Every write that loads the policy's tensors into one rank's engine."""

    sources: dict[str, tuple[int, ...]]
    """The whole shape of each policy tensor, by checkpoint name."""
    copies: list[Copy] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    """Engine tensors that nothing writes: buffers, and parameters that sleep preserves."""
    unused: list[str] = field(default_factory=list)
    """Policy tensors that nothing reads."""
    problems: dict[str, str] = field(default_factory=dict)
    """Why an engine tensor cannot be written by copies and fills; under "" what holds for all of them."""

    def write_fills(self, targets: dict[str, Tensor]) -> None:
        """Write the constants."""
        for fill in self.fills:
            fill.places.view_of(targets[fill.target]).fill_(fill.value)


def engine_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of vLLM's model, tied ones once."""
    return {name: tensor.detach() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def record_plan(
    model: nn.Module,
    targets: dict[str, Tensor],
    stand_ins: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    preserved: Iterable[str] = (),
) -> ReloadPlan:
    """Watch `model.load_weights` over the policy's names and shapes, and check what it would write.

    Nothing is written, and no tensor of the policy needs to exist.

    Args:
        model: vLLM's, mapped.
        targets: Its `engine_tensors`, or those of them that are its own: what it shares is written with its owner.
        stand_ins: (checkpoint name, tensor on meta with the whole shape), all that the policy will hand over.
        dtype: The engine's; vLLM warns once a tensor where it has to cast a matrix.
        preserved: Names of parameters that are left out on purpose.

    Returns:
        The plan; what it cannot do stands in its `problems`.
    """
    watch = _Watch(targets, engine_tensors(model))
    plan = ReloadPlan(sources={}, copies=watch.copies, fills=watch.fills, problems=watch.problems)

    def handed() -> Iterable[tuple[str, Tensor]]:
        for name, tensor in stand_ins:
            plan.sources[name] = tuple(tensor.shape)
            yield name, watch.stand_in(name, tensor, dtype)

    try:
        with torch.no_grad(), watch:
            model.load_weights(handed())  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - whatever a loader raises where it meets a tensor without data is the finding
        said = (str(error).splitlines() or [""])[0]
        watch.problems[""] = f"its loader does more than copy ({type(error).__name__}: {said})"
        written = {copy.target for copy in plan.copies} | plan.sources.keys()
        plan.kept = [name for name, _ in model.named_buffers() if name in targets and name not in written]
        return plan
    _check_coverage(plan, {name for name, _ in model.named_parameters()}, targets, set(preserved))
    used = {copy.source for copy in plan.copies}
    plan.unused = [name for name in plan.sources if name not in used]
    return plan


class _Watch(TorchDispatchMode):
    """Notes copies and fills into engine tensors instead of doing them."""

    def __init__(self, targets: dict[str, Tensor], all_tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.problems: dict[str, str] = {}
        self._written: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in targets.items():
            self._written.setdefault(tensor.untyped_storage()._cdata, []).append((name, tensor))
        self._shared = {tensor.untyped_storage()._cdata for tensor in all_tensors.values()} - self._written.keys()
        self._stand_ins: dict[int, tuple[str, Tensor]] = {}
        self._computed: dict[int, tuple[str, Tensor]] = {}
        self._numbers: dict[float, Tensor] = {}

    def stand_in(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous tensor on meta whose views are recognized as views of the source `name`."""
        is_matrix = tensor.is_floating_point() and tensor.ndim > 1
        made = torch.empty(tensor.shape, dtype=dtype if is_matrix else tensor.dtype, device="meta")
        self._stand_ins[made.untyped_storage()._cdata] = (name, made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func in SAME_VALUES and self._source_of(first):
            return first
        if func is aten._local_scalar_dense.default and first is not None and self._source_of(first):
            return self._number_for(first)
        if first is not None and func._schema.is_mutable:
            target = self._target_of(first)
            if target:
                self._note_write(func, target, first, args)
                return first
            if first.untyped_storage()._cdata in self._shared:
                return first
            if self._source_of(first):
                self.problems[""] = f"its loader writes into the checkpoint's tensors ({func})"
                return first
        result = func(*args, **kwargs)
        self._note_computed(func, args, result)
        return result

    def _target_of(self, view: Tensor) -> tuple[str, Tensor] | None:
        """The engine tensor that a view writes into."""
        for name, tensor in self._written.get(view.untyped_storage()._cdata, []):
            first = tensor.storage_offset()
            if first <= view.storage_offset() < first + max(1, _reach(tensor)):
                return name, tensor
        return None

    def _source_of(self, view: Tensor) -> tuple[str, Tensor] | None:
        return self._stand_ins.get(view.untyped_storage()._cdata) if view.is_meta else None

    def _note_write(self, func: Any, target: tuple[str, Tensor], view: Tensor, args: Any) -> None:
        name, tensor = target
        places = Strided(int(view.storage_offset() - tensor.storage_offset()), tuple(view.shape), tuple(view.stride()))
        if view.dtype != tensor.dtype:
            self.problems[name] = f"written as {view.dtype}, which it is not"
        elif func is aten.copy_.default:
            self._note_copy(name, places, args[1])
        elif func in FILLS:
            value = 0.0 if func is aten.zero_.default else args[1]
            if isinstance(value, Tensor) and self._source_of(value):
                self._note_copy(name, places, value)
            elif isinstance(value, float) and value in self._numbers:
                self._note_copy(name, places, self._numbers[value])
            else:
                self.fills.append(Fill(target=name, places=places, value=float(value)))
        else:
            self.problems[name] = f"written by {func}"

    def _note_copy(self, name: str, places: Strided, value: Tensor) -> None:
        source = self._source_of(value)
        if source is None:
            computed = self._computed.get(value.untyped_storage()._cdata)
            self.problems[name] = f"computed by {computed[0]}" if computed else "copied from a tensor of vLLM's own"
            return
        read = value.expand(places.shape)
        self.copies.append(
            Copy(
                target=name,
                places=places,
                source=source[0],
                read=Strided(int(read.storage_offset()), tuple(read.shape), tuple(read.stride())),
            )
        )

    def _number_for(self, view: Tensor) -> float:
        # A loader may fill a parameter of one element with the number read from the checkpoint: the number that it gets
        # here is like no other, so that the fill is known for a copy. Where it computes with it, the trial shows.
        number = -1.25e-3 * (1 + (len(self._numbers) + 1) * 2.0**-20)
        self._numbers[number] = view
        return number

    def _note_computed(self, func: Any, args: Any, result: Any) -> None:
        made = result if isinstance(result, Tensor) and result.is_meta else None
        if made is not None and not self._source_of(made):
            self._computed[made.untyped_storage()._cdata] = (str(func), made)  # the tensor keeps its storage's number


def _reach(tensor: Tensor) -> int:
    """How many places of its storage a tensor spans."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0


def _check_coverage(plan: ReloadPlan, parameters: set[str], targets: dict[str, Tensor], preserved: set[str]) -> None:
    """Each element of each parameter is written exactly once, or the parameter is kept; buffers may be kept too."""
    written: dict[str, list[Strided]] = {}
    for write in [*plan.copies, *plan.fills]:
        written.setdefault(write.target, []).append(write.places)
    for name, tensor in targets.items():
        if name in plan.problems:
            continue
        if name not in written:
            if name in parameters and name not in preserved:
                plan.problems[name] = "no tensor of the policy is copied there"
            plan.kept.append(name)
        else:
            count = _times_written(tensor, written[name])
            if count != "once":
                plan.problems[name] = count


def _times_written(tensor: Tensor, writes: list[Strided]) -> str:
    """ "once", or what is wrong with how often the elements are written."""
    if not tensor.numel():
        return "once"
    total = sum(places.numel for places in writes)
    own = Strided(0, tuple(tensor.shape), tuple(tensor.stride()))
    ends = []
    for places in writes:
        starts, length = runs_of(places)
        ends.append(np.stack([starts, starts + length], axis=1))
    runs = np.concatenate(ends) if ends else np.empty((0, 2), dtype=np.int64)
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    if (runs[1:, 0] < runs[:-1, 1]).any():
        return "some of its elements are written twice"
    if total != tensor.numel():
        return f"{total} of its {tensor.numel()} elements are written"
    if own.stride == row_major(own.shape) and (runs[0, 0] < 0 or runs[-1, 1] > tensor.numel()):
        return "written past its end"
    return "once"
