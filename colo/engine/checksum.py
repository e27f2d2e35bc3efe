"""Checksums of tensors by parts: what lies where, summed so that parts add up to the whole.

An engine tensor is cut into words k of 8 bytes, each of two 32-bit halves, and summed modulo 2^64:

    sum over k of  (low half + HIGH * high half) * A(k mod 512) * B(k div 512)

A and B are odd numbers made by an integer mix. It is linear in the halves, so an element adds its bits, shifted to
where they lie in its half, whoever holds the rest of the word. One changed element always changes the sum. The top bit
of a half has 2^-32 as the chance that other changes undo it, which is why the word is not taken whole: of its top bit
only the parity of the factor would be left.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colo.engine.copy_kernel import MANY_RUNS, SHORT_RUN, common_runs, cut_runs, kernel_dtypes
from colo.engine.strided import Strided

Row = tuple[Tensor, Strided, torch.dtype]
WORDS = 512
"""In a block: words that share B."""
HIGH = 0x9E3779B9
"""The high half counts 2^32 + HIGH times, which leaves word + HIGH * (word >> 32)."""
SALT = 1 << 40
"""Keeps A's numbers apart from B's."""
CHUNK_BYTES = 1 << 16
"""What one program of the CUDA kernel reads of an engine tensor at most; whole blocks."""
NUM_WARPS = 4
PIECE_BYTES = 1 << 19
"""What is summed at a time elsewhere: it stays in the cache."""


class ChecksumTable:
    """One checksum for each row, made ready once and run many times.

    Args:
        rows: (view, the places of its elements in an engine tensor, counted in elements from its first and of the
            view's shape, that tensor's dtype). All on one device. On CUDA the addresses are read here, so a table ends
            with the storages it was made for; on CPU storages may be freed and come back elsewhere.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._num_rows = len(rows)
        self._device = rows[0][0].device if rows else torch.device("cpu")
        in_kernel: dict[tuple[torch.dtype, torch.dtype], list[tuple[int, Row]]] = {}
        by_torch: list[tuple[int, Row]] = []
        for number, (view, places, dtype) in enumerate(rows):
            assert view.device == self._device, f"checksums on {view.device} in a table on {self._device}"
            assert tuple(view.shape) == places.shape, f"places of {places.shape} for a view of {tuple(view.shape)}"
            row = (number, (view.detach(), places, dtype))
            if not view.numel():
                continue
            if kernel_dtypes(view, torch.empty(0, dtype=dtype, device=view.device)) is None:
                by_torch.append(row)
            else:
                in_kernel.setdefault((view.dtype, dtype), []).append(row)
        self._launches: list[_Launch] = []
        for (source, engine), group in in_kernel.items():
            runs, left_out = _runs_by_address(group)
            by_torch.extend(left_out)
            self._launches.extend(_launches(runs, source, engine, self._device))
        self._pieces = [piece for number, row in by_torch for piece in _pieces_of(number, row)]

    def run(self) -> Tensor:
        """[num_rows] int64 on the device of the views: sums modulo 2^64; on CUDA without waiting for them."""
        sums = torch.zeros(self._num_rows, dtype=torch.int64, device=self._device)
        for launch in self._launches:
            launch.run(sums)
        scratch: dict[torch.dtype, Tensor] = {}
        for piece in self._pieces:
            sums[piece.row] += piece.sum(scratch)
        return sums


def odd_numbers(numbers: Tensor) -> Tensor:
    """The finalizer of splitmix64, made odd, of int64 numbers from 0 on."""

    def shifted(value: Tensor, by: int) -> Tensor:
        return (value >> by) & ((1 << (64 - by)) - 1)  # int64 shifts in its sign

    mixed = numbers * _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return (mixed ^ shifted(mixed, 31)) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_COLUMNS: dict[torch.device, Tensor] = {}


def _columns(device: torch.device) -> Tensor:
    """[WORDS] A of each word in a block."""
    if device not in _COLUMNS:
        _COLUMNS[device] = odd_numbers(torch.arange(WORDS, dtype=torch.int64, device=device) + SALT)
    return _COLUMNS[device]


@dataclass(frozen=True)
class _Piece:
    """A part of a row that lies within a few blocks of the engine tensor."""

    row: int
    view: Tensor
    places: Strided
    """Counted from the first of the piece's blocks."""
    factors: Tensor
    """[num_blocks] B of each block."""
    dtype: torch.dtype
    is_whole: bool
    """The view is, byte for byte, what these blocks hold."""

    def sum(self, scratch: dict[torch.dtype, Tensor]) -> Tensor:
        """The piece's checksum; writes to `scratch`."""
        if self.is_whole:
            bits = self.view
        else:
            num_elements = len(self.factors) * WORDS * 8 // self.dtype.itemsize
            if self.dtype not in scratch or len(scratch[self.dtype]) < num_elements:
                scratch[self.dtype] = torch.empty(num_elements, dtype=self.dtype, device=self.view.device)
            bits = scratch[self.dtype][:num_elements]
            if self.places.numel < num_elements:
                bits.view(torch.uint8).zero_()
            self.places.view_of(bits).copy_(self.view)
        words = bits.reshape(-1).view(torch.int64).view(-1, WORDS)
        halves = (words >> 32).bitwise_and_(0xFFFFFFFF)
        halves = torch.add(words, halves, alpha=HIGH, out=halves)
        return (halves.mul_(_columns(words.device)).sum(1) * self.factors).sum()


def _pieces_of(number: int, row: Row) -> Iterator[_Piece]:
    view, places, dtype = row
    per_block = WORDS * 8 // dtype.itemsize
    for part, where in _cut(view, places, PIECE_BYTES // dtype.itemsize):
        first_block, offset = divmod(where.offset, per_block)
        num_blocks = -(-(offset + _span(where)) // per_block)
        blocks = torch.arange(first_block + 1, first_block + 1 + num_blocks, dtype=torch.int64, device=view.device)
        is_plain = part.is_contiguous() and _is_row_major(where) and part.dtype == dtype and not part.is_neg()
        fits = where.numel == num_blocks * per_block and part.storage_offset() * dtype.itemsize % 8 == 0
        yield _Piece(
            row=number,
            view=part,
            places=Strided(offset, where.shape, where.stride),
            factors=odd_numbers(blocks),
            dtype=dtype,
            is_whole=is_plain and fits,
        )


def _cut(view: Tensor, places: Strided, limit: int) -> Iterator[tuple[Tensor, Strided]]:
    """Parts of a view whose places lie within about `limit` of each other."""
    span = _span(places)
    if span <= limit:
        yield view, places
        return
    if view.is_contiguous() and _is_row_major(places):  # one dimension can be cut anywhere
        view, places = view.view(-1), Strided(places.offset, (places.numel,), (1,))
    dim = max(range(view.dim()), key=lambda dim: (view.shape[dim] - 1) * places.stride[dim])
    step = max(1, limit // places.stride[dim])
    starts = range(0, view.shape[dim], step)
    if step > 1 and places.stride[dim] == 1:  # the first cut so that the others begin where the limit's multiples do
        starts = [0, *range(step - places.offset % step, view.shape[dim], step)]
    for start, stop in zip(starts, [*starts[1:], view.shape[dim]], strict=True):
        shape = (*places.shape[:dim], stop - start, *places.shape[dim + 1 :])
        part = Strided(places.offset + start * places.stride[dim], shape, places.stride)
        yield from _cut(view.narrow(dim, start, stop - start), part, limit)


def _span(places: Strided) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(places.shape, places.stride, strict=True))


def _is_row_major(places: Strided) -> bool:
    plain = [math.prod(places.shape[dim + 1 :]) for dim in range(len(places.shape))]
    return all(n == 1 or a == b for n, a, b in zip(places.shape, places.stride, plain, strict=True))


def _runs_by_address(group: list[tuple[int, Row]]) -> tuple[np.ndarray, list[tuple[int, Row]]]:
    """[N, 4] runs of (address, first place, elements, row), and the rows that lie too scattered for that."""
    tables, left_out = [], []
    for number, (view, places, dtype) in group:
        where, sources, length = common_runs(places.shape, places.stride, view.stride())
        if length < SHORT_RUN and len(where) > MANY_RUNS:
            left_out.append((number, (view, places, dtype)))
            continue
        runs = np.empty((len(where), 4), dtype=np.int64)
        runs[:, 0] = view.data_ptr() + sources * view.element_size()
        runs[:, 1] = places.offset + where
        runs[:, 2], runs[:, 3] = length, number
        tables.append(runs)
    return np.concatenate(tables) if tables else np.empty((0, 4), dtype=np.int64), left_out


def _launches(runs: np.ndarray, source: torch.dtype, engine: torch.dtype, device: torch.device) -> "list[_Launch]":
    """One launch where there is a cast; else one for whole words and one for what does not fill a word."""
    if source != engine:
        return [_Launch(runs, source, engine, device)]
    size = engine.itemsize
    per_word = 8 // size
    address, first, count, row = runs.T
    head = np.minimum(-first % per_word, count)
    num_words = np.where((address - first * size) % 8 == 0, (count - head) // per_word, 0)
    head = np.where(num_words > 0, head, count)
    tail = count - head - num_words * per_word
    done = head + num_words * per_word
    words = np.stack([address + head * size, (first + head) // per_word, num_words, row], axis=1)
    heads = np.stack([address, first, head, row], axis=1)
    tails = np.stack([address + done * size, first + done, tail, row], axis=1)
    edges = np.concatenate([heads, tails])
    parts = [(words[num_words > 0], torch.int64), (edges[edges[:, 2] > 0], engine)]
    return [_Launch(part, dtype, dtype, device) for part, dtype in parts if len(part)]


class _Launch:
    """One launch over contiguous runs of one dtype that lie in engine tensors of one dtype."""

    def __init__(self, runs: np.ndarray, source: torch.dtype, engine: torch.dtype, device: torch.device) -> None:
        chunk = CHUNK_BYTES // engine.itemsize
        run, start, length = cut_runs(runs[:, 2], chunk - runs[:, 1] % chunk, chunk)
        chunks = np.stack([runs[run, 0] + start * source.itemsize, runs[run, 1] + start, length, runs[run, 3]], axis=1)
        self._table = torch.from_numpy(chunks).to(device)
        self._source, self._engine = source, engine

    def run(self, sums: Tensor) -> None:
        """Add to the rows' sums."""
        if not len(self._table):
            return
        from colo.engine import triton_kernels as kernels  # noqa: PLC0415 - the CPU install has no working Triton

        same, raw = self._source == self._engine, kernels.BITS[self._engine.itemsize]
        types: dict[Any, Any] = kernels.FLOATS
        launch: Any = kernels.sum_chunks  # takes num_warps too
        with torch.cuda.device_of(self._table):
            launch[(len(self._table),)](
                self._table,
                sums,
                SOURCE=raw if same else types[self._source],
                ENGINE=raw if same else types[self._engine],
                RAW=raw,
                SAME=same,
                PER_WORD=8 // self._engine.itemsize,
                WORDS=WORDS,
                HIGH=HIGH,
                SALT=SALT,
                num_warps=NUM_WARPS,
            )
