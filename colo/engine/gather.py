"""The other ranks' shards by a gather of bounded size: for ranks whose memory this process cannot read."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from colo.engine.layouts import Layout, is_whole
from colo.engine.strided import Box, Strided, boxes_within, row_major
from colo.ranks import Ranks

ALIGNMENT = 16
"""Bytes: each shard starts at a multiple in its rank's stream, so that no element lies in two rounds."""
# torch 2.13 warns at the old name, which is the only one that 2.11 has
_all_gather: Callable[[Tensor, Tensor], object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Elements of one rank's shard, and where they go."""

    target: Tensor
    """Written in place; any strides, any dtype."""
    owner: int
    name: str
    places: Strided
    """In the owner's local shard, counted in its row-major order; of the target's shape."""


@dataclass(frozen=True, slots=True)
class _Piece:
    target: Tensor
    owner: int
    dtype: torch.dtype
    places: Strided
    """In the owner's stream, counted in elements of the dtype."""


class BucketGather:
    """Rounds of all-gather over the ranks' shards, from which each rank copies what it wants.

    A rank's stream is its shards one after another, row-major. In a round each rank gives its next `round_bytes`.

    Example: BucketGather(ranks, shards.layouts, own, names, bucket_bytes=2**28, device=ranks.device).pull(wanted)
    """

    def __init__(
        self,
        ranks: Ranks,
        layouts: list[dict[str, Layout]],
        own: Callable[[str], Tensor],
        sources: Sequence[str],
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        """Args:
        layouts: By rank, then by name.
        own: This rank's local shard by name.
        sources: The names whose bytes travel; the same on every rank.
        bucket_bytes: Limit of what a pull allocates, in bytes, as long as it is 16 for each rank and 16 more.
        """
        self._ranks, self._layouts, self._own, self._device = ranks, layouts, own, device
        self._sources, self._bucket_bytes = list(sources), bucket_bytes
        self._starts: list[list[int]] = []
        self._index = {name: number for number, name in enumerate(self._sources)}
        longest = 0
        for rank in layouts:
            starts = [0]
            for name in self._sources:
                size = rank[name].numel * rank[name].dtype.itemsize
                starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
            self._starts.append(starts)
            longest = max(longest, starts[-1])
        share = bucket_bytes // (ranks.world_size + 1) // ALIGNMENT * ALIGNMENT
        self.round_bytes = min(max(ALIGNMENT, share), max(ALIGNMENT, longest))
        self.num_rounds = -(-longest // self.round_bytes)

    @property
    def extra_bytes(self) -> int:
        """What a pull allocates while it lasts."""
        return (self._ranks.world_size + 1) * self.round_bytes

    def pull(self, wanted: Sequence[Wanted]) -> None:
        """Write what this rank wants. Collective, also for a rank that wants nothing.

        Raises:
            RuntimeError: before the first round, on every rank, where one cannot begin. A rank that fails in a round
                goes on to the last and then raises what it met; the others do not.
        """
        self._pull(lambda: wanted)

    def whole(self, name: str) -> Tensor:
        """One source with the shape of its whole, on every rank; to be read only. Collective."""
        layouts = self._layouts
        if is_whole(layouts, name):
            return self._own(name)
        shape, made = layouts[0][name].whole_shape, []

        def wanted() -> list[Wanted]:
            flat = torch.empty(math.prod(shape), dtype=layouts[0][name].dtype, device=self._device)
            made.append(flat)
            return [
                Wanted(
                    target=flat[layout[name].start : layout[name].start + layout[name].numel],
                    owner=rank,
                    name=name,
                    places=Strided(0, (layout[name].numel,), (1,)),
                )
                for rank, layout in enumerate(layouts)
                if layout[name].numel
            ]

        one = BucketGather(self._ranks, layouts, self._own, [name], self._bucket_bytes, self._device)
        one._pull(wanted)
        return made[0].reshape(shape)

    @torch.no_grad()
    def _pull(self, wanted: Callable[[], Sequence[Wanted]]) -> None:
        prepared: list[tuple[list[list[_Piece]], Tensor, Tensor]] = []

        def prepare() -> None:
            give = torch.empty(self.round_bytes, dtype=torch.uint8, device=self._device)
            bucket = torch.empty(self.round_bytes * self._ranks.world_size, dtype=torch.uint8, device=self._device)
            prepared.append((self._by_round(wanted()), give, bucket))

        self._ranks.agreed(prepare, "preparing the gather of shards")
        rounds, give, bucket = prepared[0]
        error: Exception | None = None
        with self._ranks.wait("gathering shards"):
            for number, pieces in enumerate(rounds):
                self._ranks.report("gathering shards", f"round {number + 1} of {len(rounds)}")
                try:
                    if error is None:
                        self._fill(give, number)
                except Exception as raised:  # noqa: BLE001 - raised below: leaving now would hang the others
                    error = raised
                _all_gather(bucket, give)
                try:
                    if error is None:
                        self._take(bucket, number, pieces)
                except Exception as raised:  # noqa: BLE001 - raised below: leaving now would hang the others
                    error = raised
        if error is not None:
            raise error

    def _by_round(self, wanted: Sequence[Wanted]) -> list[list[_Piece]]:
        rounds: list[list[_Piece]] = [[] for _ in range(self.num_rounds)]
        for one in wanted:
            layout, places = self._layouts[one.owner][one.name], one.places
            assert tuple(one.target.shape) == places.shape, f"{one.name}: a target must have the shape of its places"
            if not places.numel:
                continue
            reach = sum((size - 1) * stride for size, stride in zip(places.shape, places.stride, strict=True))
            inside = places.offset >= 0 and places.offset + reach < layout.numel
            assert inside, f"{one.name}: places must be within the shard of rank {one.owner}"
            size = layout.dtype.itemsize
            first = self._starts[one.owner][self._index[one.name]] // size + places.offset
            piece = _Piece(one.target, one.owner, layout.dtype, Strided(first, places.shape, places.stride))
            for number in range(first * size // self.round_bytes, (first + reach) * size // self.round_bytes + 1):
                rounds[number].append(piece)
        return rounds

    def _fill(self, give: Tensor, number: int) -> None:
        """Put this rank's next bytes into `give`."""
        starts, low = self._starts[self._ranks.rank], number * self.round_bytes
        for index in range(max(0, bisect_right(starts, low) - 1), len(self._sources)):
            if starts[index] >= low + self.round_bytes:
                break
            local = self._own(self._sources[index])
            skipped = (low - starts[index]) // local.dtype.itemsize  # negative where it begins inside of this round
            span = self.round_bytes // local.dtype.itemsize
            flat, shape = give.view(local.dtype), tuple(local.shape)
            rows = Strided(0, shape, row_major(shape))
            for box in boxes_within(rows, max(0, skipped), min(local.numel(), skipped + span)):
                part = rows.narrow(box)
                Strided(part.offset - skipped, part.shape, part.stride).view_of(flat).copy_(_cut(local, box))

    def _take(self, bucket: Tensor, number: int, pieces: list[_Piece]) -> None:
        """Copy from the bucket what lies in it of each piece."""
        targets, sources = [], []
        for piece in pieces:
            span = self.round_bytes // piece.dtype.itemsize
            flat = bucket[piece.owner * self.round_bytes : (piece.owner + 1) * self.round_bytes].view(piece.dtype)
            for box in boxes_within(piece.places, number * span, (number + 1) * span):
                part = piece.places.narrow(box)
                sources.append(Strided(part.offset - number * span, part.shape, part.stride).view_of(flat))
                targets.append(_cut(piece.target, box))
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _cut(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(box.starts, box.lengths, strict=True))]
