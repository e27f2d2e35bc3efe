"""A plan bound to where the policy's tensors lie now: the copies of one reload, and the sums of what they read."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colo.engine.build import VllmParts
from colo.engine.checksum import ChecksumTable
from colo.engine.copy_kernel import CopyTable
from colo.engine.gather import BucketGather, Wanted
from colo.engine.peers import PolicyShards
from colo.engine.plan import Copy, ReloadPlan
from colo.engine.strided import Strided, boxes_within, through
from colo.engine.trial import write_by_bracket
from colo.ranks import Ranks
from colo.types import TensorShard

_Row = tuple[int, Tensor, Strided, torch.dtype]
"""(number of the copy, view of what this rank was handed, its places in the target, the target's dtype)."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """What a reload writes into this rank's engine, by where it was read from."""

    own: int
    peer: int
    gather: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.own + self.peer + self.gather


class Replay:
    """The copies from the shards that a rank was handed, and from those of the others, into its engine."""

    def __init__(
        self,
        ranks: Ranks,
        plans: list[ReloadPlan],
        targets: dict[str, Tensor],
        shards: PolicyShards,
        names: Iterable[str],
        bucket_bytes: int,
    ) -> None:
        """Bind.

        Args:
            ranks: Who reads and who is read.
            plans: One for each rank of a tensor-parallel group; this rank's engine is written by its own.
            targets: The tensors of this rank's engine.
            shards: Freshly exchanged.
            names: The sources to copy, in one order on every rank; all, or those of one chunk.
            bucket_bytes: What a gather may hold at a time.
        """
        self._ranks, self._plans, self._targets, self._shards = ranks, plans, targets, shards
        self._names = set(names)
        plan = plans[ranks.group_rank]
        moved = {"own": 0, "peer": 0, "gather": 0}
        pairs: list[tuple[Tensor, Tensor]] = []
        self._wanted: list[Wanted] = []
        for copy in plan.copies:
            if copy.source not in self._names:
                continue
            for owner in shards.owners(copy.source):
                for places, local in _parts(copy, owner, shards):
                    target = places.view_of(targets[copy.target])
                    moved[shards.transport_of(owner)] += target.nbytes
                    source = shards.local_of(owner, copy.source)
                    if source is None:
                        self._wanted.append(Wanted(target=target, owner=owner, name=copy.source, places=local))
                        continue
                    for box, memory in through(local, tuple(source.shape), source.stride()):
                        pairs.append((places.narrow(box).view_of(targets[copy.target]), memory.view_of(source)))
        self.bytes = Bytes(**moved)
        self._table = CopyTable(pairs)
        spread = [name for name in plan.sources if name in self._names and not shards.is_whole(name)]
        self._gather = BucketGather(ranks, shards.layouts, self._own, spread, bucket_bytes, ranks.device)
        self._sums: list[_SourceSums] = []
        self._summed: list[int] = []

    @property
    def extra_bytes(self) -> int:
        """What a reload allocates for its duration."""
        return self._gather.extra_bytes if self._shards.is_gathering else 0

    def pull(self) -> Exception | None:
        """Copy what travels in buckets. Collective.

        Returns:
            What went wrong on this rank, which has taken part to the last round all the same.
        """
        try:
            if self._shards.is_gathering:
                self._gather.pull(self._wanted)
        except Exception as error:  # noqa: BLE001 - the caller raises it once every rank knows
            return error
        return None

    def copy(self) -> None:
        """Copy what this rank can read itself, without waiting for the device."""
        self._table.run()

    def whole(self, name: str) -> Tensor:
        """A source, whole. Collective where it is spread."""
        return self._own(name) if self._shards.is_whole(name) else self._gather.whole(name)

    def _own(self, name: str) -> Tensor:
        local = self._shards.local_of(self._ranks.rank, name)
        assert local is not None, f"{name} must be among what this rank was handed"
        return local

    def write_by_bracket(self, parts: VllmParts, names: Iterable[str]) -> Exception | None:
        """Write every source, whole, by vLLM's own reload. Collective; returns as `pull`."""
        left = iter(names)
        weights = ((name, self.whole(name)) for name in left)
        try:
            write_by_bracket(parts, weights, self._plans[self._ranks.group_rank], self._targets)
        except Exception as error:  # noqa: BLE001 - as above
            for name in left:  # the other ranks still gather these
                try:
                    self.whole(name)
                except Exception as another:  # noqa: BLE001 - as above
                    error.add_note(f"and then, gathering {name}: {another}")
            return error
        return None

    def source_sums(self, handed: dict[str, TensorShard]) -> tuple[list[np.ndarray], np.ndarray]:
        """Sums over the tensors that this rank was handed now; the addresses in the table of copies may be stale.

        Returns:
            For each group rank's plan what this rank's shards add to the sum of each copy, [num_copies] int64, to be
            summed over the ranks; and, for its own plan, the sums of the copies whose source every rank has whole.
        """
        addresses = [shard.local.data_ptr() for shard in handed.values()]
        if addresses != self._summed:
            whole = {name for name in handed if self._shards.is_whole(name)}
            spread = {name: shard.local for name, shard in handed.items() if name not in whole}
            own = {name: handed[name].local for name in whole}
            self._sums = [_SourceSums(self._rows(plan, spread), len(plan.copies)) for plan in self._plans]
            plan = self._plans[self._ranks.group_rank]
            self._sums.append(_SourceSums(self._rows(plan, own), len(plan.copies)))
            self._summed = addresses
        *by_plan, own_sums = [sums.run() for sums in self._sums]
        return by_plan, own_sums

    def _rows(self, plan: ReloadPlan, tensors: dict[str, Tensor]) -> Iterator[_Row]:
        rank = self._ranks.rank
        for number, copy in enumerate(plan.copies):
            if copy.source in tensors and rank in self._shards.owners(copy.source):
                source = tensors[copy.source].detach()
                for places, local in _parts(copy, rank, self._shards):
                    for box, memory in through(local, tuple(source.shape), source.stride()):
                        yield number, memory.view_of(source), places.narrow(box), self._targets[copy.target].dtype


class _SourceSums:
    """Sums by copy over views, which may lie on several devices."""

    def __init__(self, rows: Iterable[_Row], num_copies: int) -> None:
        by_device: dict[torch.device, list[_Row]] = {}
        for row in rows:
            by_device.setdefault(row[1].device, []).append(row)
        self._num_copies = num_copies
        self._tables = [
            (np.array([row[0] for row in rows], dtype=np.int64), ChecksumTable([row[1:] for row in rows]))
            for rows in by_device.values()
        ]

    def run(self) -> np.ndarray:
        sums = np.zeros(self._num_copies, dtype=np.int64)
        for numbers, table in self._tables:
            np.add.at(sums, numbers, table.run().cpu().numpy())
        return sums


def _parts(copy: Copy, owner: int, shards: PolicyShards) -> Iterator[tuple[Strided, Strided]]:
    """The part of a copy that lies with `owner`: (places in the target, places in its shard in row-major order)."""
    layout = shards.layouts[owner][copy.source]
    for box in boxes_within(copy.read, layout.start, layout.start + layout.numel):
        read = copy.read.narrow(box)
        yield copy.places.narrow(box), Strided(read.offset - layout.start, read.shape, read.stride)
