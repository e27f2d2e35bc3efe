"""Where the elements of a view lie in a flat sequence: the arithmetic of a reload's slices, without data."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Strided:
    """The places offset + sum(index[d] * stride[d]), in elements, one for each index into `shape`.

    Example: Strided(128, (64, 32), (256, 1)) are the first 32 columns of 64 rows of 256, from place 128 on.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many places there are."""
        return math.prod(self.shape)

    def view_of(self, base: Tensor) -> Tensor:
        """The elements at these places, counted from the first element of `base`, whatever its own shape is."""
        return torch.as_strided(base, self.shape, self.stride, base.storage_offset() + self.offset)

    def narrow(self, box: "Box") -> "Strided":
        """The places of a box of the indices."""
        offset = self.offset + sum(start * stride for start, stride in zip(box.starts, self.stride, strict=True))
        return Strided(offset, box.lengths, self.stride)


@dataclass(frozen=True)
class Box:
    """In each dimension the indices [start, start + length)."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def boxes_within(view: Strided, low: int, high: int) -> Iterator[Box]:
    """Cut a view into boxes so that all places in [low, high) are covered exactly, and no other.

    Rows that lie whole inside make one box; only rows that the limits cut are looked at one by one.
    """
    order = sorted(range(len(view.shape)), key=lambda dim: -view.stride[dim])
    reach = [0] * (len(order) + 1)  # of the dimensions from this one inwards
    for level in reversed(range(len(order))):
        dim = order[level]
        reach[level] = reach[level + 1] + (view.shape[dim] - 1) * view.stride[dim]

    def cut(level: int, first: int, starts: list[int], lengths: list[int]) -> Iterator[Box]:
        if first >= high or first + reach[level] < low:
            return
        if low <= first and first + reach[level] < high:
            yield Box(tuple(starts), tuple(lengths))
            return
        dim = order[level]
        stride, inner = view.stride[dim], reach[level + 1]
        begin = max(0, -(-(low - first) // stride))  # the first index whose places are none below low
        end = min(view.shape[dim], (high - 1 - inner - first) // stride + 1)  # past the last with none from high on
        whole = range(begin, max(begin, end))
        touched = range(
            max(0, -(-(low - inner - first) // stride)), min(view.shape[dim], (high - 1 - first) // stride + 1)
        )
        for index in [i for i in touched if i < whole.start]:
            yield from cut(level + 1, first + index * stride, *_at(dim, index, 1, starts, lengths))
        if whole:
            yield Box(*map(tuple, _at(dim, whole.start, len(whole), starts, lengths)))
        for index in [i for i in touched if i >= whole.stop]:
            yield from cut(level + 1, first + index * stride, *_at(dim, index, 1, starts, lengths))

    if view.numel:
        yield from cut(0, view.offset, [0] * len(view.shape), list(view.shape))


def _at(dim: int, start: int, length: int, starts: list[int], lengths: list[int]) -> tuple[list[int], list[int]]:
    starts, lengths = list(starts), list(lengths)
    starts[dim], lengths[dim] = start, length
    return starts, lengths


def through(view: Strided, shape: tuple[int, ...], stride: tuple[int, ...]) -> Iterator[tuple[Box, Strided]]:
    """Turn places in a tensor's row-major order into places in its memory.

    Args:
        view: Counted in row-major order of a tensor of `shape`.
        shape: Of that tensor.
        stride: Of that tensor in its memory, which need not be contiguous.

    Yields:
        A box of the view's indices, and where its elements lie, counted from the tensor's first element.
    """
    plain = row_major(shape)
    if all(size == 1 or a == b for size, a, b in zip(shape, stride, plain, strict=True)):
        yield Box((0,) * len(view.shape), view.shape), view
        return
    index = [view.offset // step % size if size > 1 else 0 for size, step in zip(shape, plain, strict=True)]
    room = [size - 1 - at for size, at in zip(shape, index, strict=True)]
    steps = []
    for dim, (size, step) in enumerate(zip(view.shape, view.stride, strict=True)):
        if size == 1 or step == 0:
            steps.append(0)
            continue
        steps_along = [a for a, unit in enumerate(plain) if step % unit == 0 and step // unit < shape[a] > 1]
        axis = steps_along[0] if steps_along else 0
        used = (size - 1) * (step // plain[axis])
        if not steps_along or used > room[axis]:  # it runs over the end of a row: take its indices one by one
            for at in range(size):
                for box, places in through(view.narrow(_one(view, dim, at)), shape, stride):
                    yield Box(_put(box.starts, dim, at), box.lengths), places
            return
        room[axis] -= used
        steps.append(step // plain[axis] * stride[axis])
    offset = sum(at * unit for at, unit in zip(index, stride, strict=True))
    yield Box((0,) * len(view.shape), view.shape), Strided(offset, view.shape, tuple(steps))


def _one(view: Strided, dim: int, at: int) -> Box:
    return Box(_put((0,) * len(view.shape), dim, at), _put(view.shape, dim, 1))


def _put(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def runs_of(view: Strided) -> tuple[np.ndarray, int]:
    """The view as runs of neighbouring places: ([N] int64 first places, their common length)."""
    dims = sorted(((s, n) for n, s in zip(view.shape, view.stride, strict=True) if n > 1), reverse=True)
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    starts = np.array([view.offset], dtype=np.int64)
    for stride, size in dims:
        starts = (starts[:, None] + stride * np.arange(size, dtype=np.int64)).reshape(-1)
    return starts, length
