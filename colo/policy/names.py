"""The one name map between the policy's parameters and the tensors of a model folder.

transformers packs what a folder keeps apart (a layer's experts) and knows how to undo it when it saves. That
conversion is run once over stand-ins without data, and each tensor that comes out is read as a box of a parameter.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from colo.types import TensorShard


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A folder's tensor as a box of one parameter or persistent buffer.

    Example: Piece(name="model.layers.0.mlp.experts.3.up_proj.weight",
        parameter="model.layers.0.mlp.experts.gate_up_proj", box=((3, 1), (128, 128), (0, 64)), shape=(128, 64))
    """

    name: str
    """In the folder."""
    parameter: str
    """In the model; of tied parameters, the one name that `named_parameters` gives."""
    box: tuple[tuple[int, int], ...]
    """(start, length) in each dimension of the parameter."""
    shape: tuple[int, ...]
    """In the folder: the box's lengths, some of length 1 left out."""

    def of(self, full: Tensor) -> Tensor:
        """The folder's tensor as a view of the whole parameter."""
        for dim, (start, length) in enumerate(self.box):
            full = full.narrow(dim, start, length)
        return full.view(self.shape)

    def rows_within(self, rows: tuple[int, int]) -> tuple[int, int]:
        """Those of the parameter's rows [first, end) in the box, as [low, high) in the parameter; maybe none."""
        start, length = self.box[0]
        low = min(max(start, rows[0]), start + length)
        return low, max(low, min(start + length, rows[1]))

    def part_of(self, local: Tensor, rows: tuple[int, int]) -> Tensor:
        """The box as a view of the parameter's rows [first, end) alone, in all of the parameter's dimensions."""
        low, high = self.rows_within(rows)
        part = local[max(low - rows[0], 0) : max(high - rows[0], 0)]
        for dim, (start, length) in enumerate(self.box[1:], start=1):
            part = part.narrow(dim, start, length)
        return part

    def shard_of(self, local: Tensor, rows: tuple[int, int]) -> TensorShard:
        """The part of the folder's tensor that lies in the parameter's rows [first, end), as a view of them.

        A box is cut by its rows, which come first in row-major order whether or not the folder keeps a dimension of
        length 1. So the part is one range of the tensor; of one expert of a packed parameter it is all or nothing.
        """
        if not self.box:  # a buffer that is one number
            return TensorShard(shape=self.shape, start=0, local=local)
        part = self.part_of(local, rows)
        numel = math.prod(self.shape)
        start = (self.rows_within(rows)[0] - self.box[0][0]) * math.prod(part.shape[1:])
        assert start + part.numel() <= numel, f"{self.name} must hold its part, got {start} + {part.numel()} of {numel}"
        if part.numel() == numel:
            part = part.view(self.shape)
        return TensorShard(shape=self.shape, start=start, local=part)


class _ViewsInsteadOfCopies(TorchDispatchMode):
    """A copy that only makes a tensor contiguous returns its argument, so that its origin can be told."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters (tied ones once) and persistent buffers of a model, by their names in it."""
    stored = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers


def checkpoint_pieces(model: PreTrainedModel) -> list[Piece]:
    """How a model folder names and cuts the model's parameters and persistent buffers.

    Args:
        model: Its data is not read; it may be on meta.

    Returns:
        Pieces in the order of `stored_tensors`; each element of each tensor is in exactly one.

    Raises:
        ValueError: the folder holds a tensor that is computed from the parameters, not cut out of them.
    """
    tensors = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in stored_tensors(model).items()}
    owners = {t.untyped_storage()._cdata: name for name, t in tensors.items()}
    with torch.no_grad(), _ViewsInsteadOfCopies():
        converted = revert_weight_conversion(model, dict(tensors))
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    for name, view in converted.items():
        owner = owners.get(view.untyped_storage()._cdata)
        box = None if owner is None else _box(view, tensors[owner])
        if owner is None or box is None:
            raise ValueError(
                f"model must have each tensor of its folder as a box of a parameter, got {model.config.model_type} "
                f"with {name} {list(view.shape)}, which is computed or turned"
            )
        pieces[owner].append(Piece(name=name, parameter=owner, box=box, shape=tuple(view.shape)))
    for name, cut in pieces.items():
        covered = sum(math.prod(piece.shape) for piece in cut)
        if covered != tensors[name].numel():
            raise ValueError(
                f"model must have each parameter whole in its folder, got {model.config.model_type} with {covered} of "
                f"{tensors[name].numel()} elements of {name}"
            )
    return [piece for cut in pieces.values() for piece in cut]


def _box(view: Tensor, whole: Tensor) -> tuple[tuple[int, int], ...] | None:
    """Where a view of a contiguous tensor lies in it, or None where it is no box in the same order of dimensions."""
    starts, rest = [], view.storage_offset()
    for stride in whole.stride():
        starts.append(rest // stride if whole.numel() else 0)
        rest -= starts[-1] * stride
    lengths = [1] * whole.dim()
    dim = 0
    for size, stride in zip(view.shape, view.stride(), strict=True):
        if size == 1:
            continue
        while dim < whole.dim() and (whole.stride(dim) != stride or whole.shape[dim] == 1):
            dim += 1
        if dim == whole.dim() or starts[dim] + size > whole.shape[dim]:
            return None
        lengths[dim] = size
        dim += 1
    return tuple(zip(starts, lengths, strict=True))
