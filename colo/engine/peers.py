"""The other ranks' shards of the policy: who holds what, and views of what this process can read of it."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from colo.engine.handles import (
    SHARED_MEMORY,
    export_storage,
    free_shared_memory,
    host_name,
    open_storage,
    segment_bytes,
)
from colo.engine.layouts import Layout, check_local, check_sources, fingerprint, lay_out
from colo.ranks import Ranks
from colo.types import TensorShard

logger = logging.getLogger(__name__)
T = TypeVar("T")
MIB = 2**20


@dataclass(kw_only=True)
class _Holding:
    """What a rank tells the others about itself before any handle is made."""

    generation: int
    host: str
    device: int | None
    layouts: dict[str, Layout]
    placing_bytes: list[int]
    """By storage: the shared memory that it takes to place it; 0 where it is there already, or on a GPU."""
    free_bytes: int


@dataclass(kw_only=True)
class _Exported:
    generation: int
    handles: dict[int, Any]
    """By storage."""
    failed: str = ""


class PolicyShards:
    """The policy's shards on all ranks, as this rank can read them.

    Holds a reference to each local shard it was handed, so that no other storage can take its address unseen.
    `drop` gives them back.

    Example: shards.refresh(handed); shards.local_of(1, "lm_head.weight")
    """

    def __init__(self, ranks: Ranks, transport: str, host: str | None = None) -> None:
        """`transport`: reload.transport; `host`: what is equal on ranks that can share memory, found if not given."""
        self._ranks, self._transport = ranks, transport
        self._host = host_name(ranks.device) if host is None else host
        self.generation = 0
        self.layouts: list[dict[str, Layout]] = []
        """By rank, then by name."""
        self._whole: set[str] = set()
        self._handed: list[tuple[object, ...]] | None = None
        self._own: dict[str, Tensor] = {}
        self._opened: dict[int, dict[int, Tensor]] = {}
        self._hindrances: list[list[str]] = []
        """[reader][owner]: why the reader takes no handle of the owner; empty where it does."""

    def refresh(self, handed: dict[str, TensorShard]) -> bool:
        """Look whether a shard moved on any rank, and if so exchange layouts and handles anew. Collective.

        No rank returns before each has come, with what it wrote to its shards done.

        Returns:
            True where layouts and views are new.

        Raises:
            ValueError: a tensor of a wrong device or dtype, or the shards do not add up to the whole.
            RuntimeError: `peer`, and a rank that another cannot read.
        """
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)
        moved = self._agreed(
            lambda: self._handed is None or self._handed != fingerprint(handed), "looking for moved weights"
        )
        if any(moved):
            self._exchange(handed)
        return any(moved)

    def owners(self, name: str) -> list[int]:
        """The ranks to read a source from: those with an element of it, or this rank where each has it whole."""
        if name in self._whole:
            return [self._ranks.rank]
        return [rank for rank, layouts in enumerate(self.layouts) if layouts[name].numel]

    def is_whole(self, name: str) -> bool:
        """True where every rank holds all of the source."""
        return name in self._whole

    @property
    def is_gathering(self) -> bool:
        """True on every rank where one of them can read another by gather only."""
        return any(any(why) for why in self._hindrances)

    def local_of(self, rank: int, name: str) -> Tensor | None:
        """A rank's local shard, live, or None where this rank cannot read it through a handle."""
        assert self.layouts, "refresh must come before shards are read"
        if rank == self._ranks.rank:
            return self._own[name]
        if rank not in self._opened or name in self._whole:
            return None
        layout = self.layouts[rank][name]
        empty = torch.empty(0, dtype=layout.dtype, device=self._ranks.device)
        if layout.storage is None:
            return empty.reshape(layout.shape)
        storage = self._opened[rank][layout.storage].untyped_storage()
        return empty.set_(storage, layout.offset, layout.shape, layout.stride)

    def transport_of(self, rank: int) -> str:
        """How this rank reads another: "own", "peer" or "gather"."""
        if rank == self._ranks.rank:
            return "own"
        return "peer" if rank in self._opened else "gather"

    def describe(self) -> str:
        """One line for the log; the same on every rank."""
        if self._ranks.world_size == 1:
            return "the one rank reads the policy's weights where they are"
        num_gathered = [sum(map(bool, why)) for why in self._hindrances]
        num_peers = [self._ranks.world_size - 1 - count for count in num_gathered]
        return (
            f"each rank reads {_range_of(num_peers)} peers of its host through memory handles and "
            f"{_range_of(num_gathered)} ranks by gather"
        )

    def drop(self) -> None:
        """Forget every view and handle, so that the policy may free or move its storages. Collective."""
        self._opened = {}
        self._handed = None
        if self._ranks.world_size > 1:
            self._ranks.gather(None, "dropping the views of the policy")  # after it, nobody looks at my storages
        self._own, self.layouts = {}, []

    def _agreed(self, do: Callable[[], T], what: str) -> list[T]:
        return self._ranks.agreed(do, what) if self._ranks.world_size > 1 else [do()]

    def _exchange(self, handed: dict[str, TensorShard]) -> None:
        self._opened = {}  # before the gather: after it, an owner may let go of what it had handed out
        self._handed = None
        self.generation += 1
        rows = self._agreed(lambda: self._hold(handed), "telling which shards each rank holds")
        assert {row.generation for row in rows} == {self.generation}, "each rank must take part in each exchange"
        self.layouts = [row.layouts for row in rows]
        self._whole = check_sources(self.layouts)
        self._own = {name: shard.local.detach() for name, shard in handed.items()}
        before = self._hindrances
        self._hindrances = self._connect(rows)
        self._refuse_hindrances(rows, self._hindrances != before)
        self._handed = fingerprint(handed)  # after the placing, which moves storages

    def _hold(self, handed: dict[str, TensorShard]) -> _Holding:
        on_cpu = self._ranks.device.type == "cpu"
        for name, shard in handed.items():
            # One that a rank has whole, such as a folder's, may lie on the host: nobody else reads it.
            is_all = shard.local.numel() == math.prod(shard.shape)
            check_local(name, shard.local, shard.local.device if is_all else self._ranks.device)
        layouts, storages = lay_out(handed)
        placing = [segment_bytes(one) if on_cpu and not one.is_shared() else 0 for one in storages]
        return _Holding(
            generation=self.generation,
            host=self._host,
            device=self._ranks.device.index,
            layouts=layouts,
            placing_bytes=placing,
            free_bytes=free_shared_memory() if on_cpu else 0,
        )

    def _connect(self, rows: list[_Holding]) -> list[list[str]]:
        me, others = self._ranks.rank, [rank for rank in range(len(rows)) if rank != self._ranks.rank]
        if not others:
            return [[""]]
        if self._transport == "gather":
            return [
                ["" if a == b else "reload.transport is gather" for a in range(len(rows))] for b in range(len(rows))
            ]
        crowded = _crowded_hosts(rows, self._whole)
        readers = [rank for rank in others if not _hindrance(rows[rank], rows[me], crowded)]
        exported = self._agreed(lambda: self._export(bool(readers)), "exporting the policy's memory")

        def open_all() -> list[str]:
            hindrances = [""] * len(rows)
            for rank in others:
                hindrances[rank] = _hindrance(rows[me], rows[rank], crowded) or self._open(rank, exported[rank])
            return hindrances

        return self._agreed(open_all, "opening the memory of the other ranks")

    def _export(self, is_read: bool) -> _Exported:
        exported = _Exported(generation=self.generation, handles={})
        if not is_read:
            return exported
        try:
            for name, layout in self.layouts[self._ranks.rank].items():
                if layout.storage is not None and layout.storage not in exported.handles and name not in self._whole:
                    exported.handles[layout.storage] = export_storage(self._own[name])
        except (RuntimeError, OSError) as error:  # every rank learns of it: `peer` raises, `auto` gathers
            exported.failed = f"exporting failed with {type(error).__name__}: {error}"
        return exported

    def _open(self, rank: int, exported: _Exported) -> str:
        assert exported.generation == self.generation, "a handle of another generation is never opened"
        if exported.failed:
            return exported.failed
        try:
            opened = {number: open_storage(handle, self._ranks.device) for number, handle in exported.handles.items()}
        except (RuntimeError, OSError) as error:  # every rank learns of it: `peer` raises, `auto` gathers
            return f"opening failed with {type(error).__name__}: {error}"
        self._opened[rank] = opened
        return ""

    def _refuse_hindrances(self, rows: list[_Holding], is_news: bool) -> None:
        pairs = [(a, b, why) for a, row in enumerate(self._hindrances) for b, why in enumerate(row) if why]
        if self._transport == "peer" and pairs:
            self._opened = {}
            reader, owner, why = pairs[0]
            more = f" (and {len(pairs) - 1} more pairs of ranks)" if len(pairs) > 1 else ""
            raise RuntimeError(f"reload.transport=peer: rank {reader} cannot read rank {owner}: {why}{more}")
        if not is_news or not self._ranks.is_main:
            return
        logger.info("reload: %s", self.describe())
        for reader, owner, why in pairs:
            if self._transport == "auto" and rows[reader].host == rows[owner].host:
                logger.warning("reload: rank %d reads rank %d by gather: %s", reader, owner, why)


def check_shared_memory(num_bytes: int, transport: str) -> None:
    """Look whether the shards of this host's ranks, in bytes, fit into shared memory. For CPU, several ranks a host.

    Raises:
        ValueError: `peer`, and they do not. (`auto` will gather, which is logged.)
    """
    free = free_shared_memory()
    if transport == "gather" or num_bytes <= free:
        return
    need = f"{-(-num_bytes // MIB)} MiB"
    if transport == "peer":
        raise ValueError(
            f"reload.transport must be gather or auto where {SHARED_MEMORY} has less than {need} free, "
            f"got 'peer' with {free // MIB} MiB"
        )
    logger.warning(
        "reload.transport=auto: the ranks of this host read each other by gather, since %s has %d MiB free of the %s "
        "that the policy takes",
        SHARED_MEMORY, free // MIB, need,
    )  # fmt: skip


def _hindrance(reader: _Holding, owner: _Holding, crowded: dict[str, str]) -> str:
    """Why a rank cannot take a handle of another, as far as is known before trying; for pairs with this rank in it."""
    if reader.host != owner.host:
        return "it is on another host"
    if owner.host in crowded:
        return crowded[owner.host]
    if reader.device is None or reader.device == owner.device or owner.device is None:
        return ""
    can_access = torch.cuda.can_device_access_peer(reader.device, owner.device)
    return "" if can_access else f"cuda:{reader.device} has no peer access to cuda:{owner.device}"


def _crowded_hosts(rows: list[_Holding], whole: set[str]) -> dict[str, str]:
    """Hosts of several ranks whose shared memory is too small to place their shards, and what is said about it."""
    crowded = {}
    for host in {row.host for row in rows}:
        members = [row for row in rows if row.host == host]
        needed = 0
        for row in members:
            spread = {layout.storage for name, layout in row.layouts.items() if name not in whole} - {None}
            needed += sum(row.placing_bytes[number] for number in spread if number is not None)
        free = min(row.free_bytes for row in members)
        if len(members) > 1 and needed > free:
            crowded[host] = f"{SHARED_MEMORY} has {free // MIB} MiB free of the {-(-needed // MIB)} MiB that are needed"
    return crowded


def _range_of(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
