"""All slices of a reload in one launch on CUDA; on CPU one call over views."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
CHUNK_BYTES = 1 << 15
"""What one program of a kernel reads and writes at most, on the wider side."""
BLOCK_BYTES = 1 << 15
"""What it has on the way at a time: on an H200 all at once was the fastest."""
NUM_WARPS = 16
SHORT_RUN = 16
"""Views whose elements lie together in fewer than so many go by PyTorch's own copy."""
MANY_RUNS = 64
CAST_IN_KERNEL = {torch.float32, torch.float16, torch.bfloat16}


class CopyTable:
    """Copies between views, made ready once and run many times.

    Args:
        pairs: (destination, source) of one shape each; any strides, alignment and pair of dtypes. Destinations do not
            overlap. On CUDA the addresses are read here, so a table ends with the storages it was made for; on CPU
            storages may be freed and come back elsewhere.
    """

    num_bytes: int
    """What a run reads and writes, together."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.num_bytes = 0
        self._by_torch: list[Pair] = []
        self._launches: list[_Launch] = []
        in_kernel: dict[tuple[torch.dtype | int, torch.dtype | int], list[Pair]] = {}
        for destination, source in pairs:
            assert destination.shape == source.shape, f"a copy of {source.shape} into {destination.shape}"
            destination, source = destination.detach(), source.detach()
            self.num_bytes += destination.numel() * (destination.element_size() + source.element_size())
            kinds = kernel_dtypes(source, destination) if destination.numel() else None
            if kinds is None:
                self._by_torch.append((destination, source))
            else:
                in_kernel.setdefault(kinds, []).append((destination, source))
        for kinds, group in in_kernel.items():
            launch = _Launch(group, kinds)
            self._by_torch.extend(launch.left_out)
            self._launches.append(launch)

    def run(self) -> None:
        """Copy everything; on CUDA without waiting for it."""
        for launch in self._launches:
            launch.run()
        if self._by_torch:
            destinations, sources = map(list, zip(*self._by_torch, strict=True))
            torch._foreach_copy_(destinations, sources)  # pyright: ignore[reportPrivateImportUsage]


def kernel_dtypes(source: Tensor, destination: Tensor) -> tuple[torch.dtype | int, torch.dtype | int] | None:
    """What a kernel loads and stores: a cast between floats, or bytes an element; None where PyTorch has to copy."""
    if destination.device.type != "cuda" or source.device != destination.device:
        return None
    if source.is_conj() or source.is_neg() or source.element_size() > 8:
        return None
    if source.dtype == destination.dtype:
        return source.element_size(), source.element_size()
    if {source.dtype, destination.dtype} <= CAST_IN_KERNEL:
        return source.dtype, destination.dtype
    return None


class _Launch:
    """One launch over all contiguous runs of the pairs of one pair of dtypes."""

    def __init__(self, pairs: list[Pair], kinds: tuple[torch.dtype | int, torch.dtype | int]) -> None:
        self.left_out: list[Pair] = []
        source_size, target_size = pairs[0][1].element_size(), pairs[0][0].element_size()
        rows = []
        for destination, source in pairs:
            targets, sources, length = common_runs(destination.shape, destination.stride(), source.stride())
            if length < SHORT_RUN and len(targets) > MANY_RUNS:
                self.left_out.append((destination, source))
                continue
            runs = np.empty((len(targets), 3), dtype=np.int64)
            runs[:, 0] = source.data_ptr() + sources * source_size
            runs[:, 1] = destination.data_ptr() + targets * target_size
            runs[:, 2] = length
            rows.append(runs)
        self._device = pairs[0][0].device
        self._kinds = kinds
        runs = np.concatenate(rows) if rows else np.empty((0, 3), dtype=np.int64)
        chunks = _cut_chunks(runs, source_size, target_size)
        self._block = BLOCK_BYTES // max(source_size, target_size)
        self._table = torch.from_numpy(chunks).to(self._device)

    def run(self) -> None:
        if not len(self._table):
            return
        from colo.engine import triton_kernels as kernels  # noqa: PLC0415 - the CPU install has no working Triton

        types: dict[Any, Any] = {**kernels.BITS, **kernels.FLOATS}
        launch: Any = kernels.copy_chunks  # takes num_warps too
        with torch.cuda.device_of(self._table):
            launch[(len(self._table),)](
                self._table, types[self._kinds[0]], types[self._kinds[1]], BLOCK=self._block, num_warps=NUM_WARPS
            )


def common_runs(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """The runs of elements that are neighbours on both sides.

    Args:
        shape: Of both sides; not empty.
        a: The strides of one side, in elements.
        b: Those of the other.

    Returns:
        [N] int64 first places of the runs on either side, counted from the first element, and their common length.
    """
    dims = sorted(((sa, sb, n) for n, sa, sb in zip(shape, a, b, strict=True) if n > 1), key=lambda dim: -dim[0])
    joined: list[tuple[int, int, int]] = []
    for stride_a, stride_b, size in dims:
        if joined and joined[-1][0] == stride_a * size and joined[-1][1] == stride_b * size:
            size *= joined.pop()[2]
        joined.append((stride_a, stride_b, size))
    length = joined.pop()[2] if joined and joined[-1][:2] == (1, 1) else 1
    first_a = first_b = np.zeros(1, dtype=np.int64)
    for stride_a, stride_b, size in joined:
        index = np.arange(size, dtype=np.int64)
        first_a = (first_a[:, None] + stride_a * index).reshape(-1)
        first_b = (first_b[:, None] + stride_b * index).reshape(-1)
    return first_a, first_b, length


def cut_runs(lengths: np.ndarray, firsts: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut runs into chunks: the first of run i has `firsts[i]` elements, those after it `chunk`, the last what is left.

    Returns:
        [M] int64 each: the run of a chunk, where in the run it starts, and how many elements it has.
    """
    firsts = np.minimum(firsts, lengths)
    nums = 1 + -(-(lengths - firsts) // chunk)
    run = np.arange(len(lengths), dtype=np.int64)
    if (nums == 1).all():
        return run, np.zeros_like(run), firsts
    run = np.repeat(run, nums)
    index = np.arange(len(run), dtype=np.int64) - np.repeat(np.cumsum(nums) - nums, nums)
    start = np.where(index == 0, 0, firsts[run] + (index - 1) * chunk)
    return run, start, np.where(index == 0, firsts[run], np.minimum(chunk, lengths[run] - start))


def _cut_chunks(runs: np.ndarray, source_size: int, target_size: int) -> np.ndarray:
    """[N, 3] runs (source address, target address, elements) in chunks that start on 16 bytes where both sides can."""
    chunk = CHUNK_BYTES // max(source_size, target_size)
    to_source, to_target = (-runs[:, 0] & 15) // source_size, (-runs[:, 1] & 15) // target_size
    wide = max(source_size, target_size)
    head = to_source if source_size < target_size else to_target  # of the narrow side, whose turn comes less often
    other = to_target if source_size < target_size else to_source
    both = ((head - other) % (16 // wide) == 0) & (head > 0)
    run, start, length = cut_runs(runs[:, 2], np.where(both, head, chunk), chunk)
    return np.stack([runs[run, 0] + start * source_size, runs[run, 1] + start * target_size, length], axis=1)
