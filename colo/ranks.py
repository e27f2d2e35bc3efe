"""This process under torchrun: start, stop, groups, and the collectives we use."""

import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

logger = logging.getLogger(__name__)
T = TypeVar("T")
PROGRESS_EVERY_S = 1.0
GIVE_WAY_S = 3.0


@dataclass(kw_only=True)
class Ranks:
    """Who this process is, and how it speaks with the others. `start_ranks` makes it."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    tensor_parallel_size: int
    notice_s: float
    store: Store
    group: "dist.ProcessGroup | None" = None
    """The ranks that share this rank's engine, over gloo."""
    _arrivals: dict[int, int] = field(default_factory=dict)
    """How many waits this rank has entered, by how many ranks they are over."""
    _place: str = ""
    _reported_at: float = 0.0

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone writes files and prints."""
        return self.rank == 0

    @property
    def num_replicas(self) -> int:
        """Independent engines."""
        return self.world_size // self.tensor_parallel_size

    @property
    def replica(self) -> int:
        """Which engine this rank is part of."""
        return self.rank // self.tensor_parallel_size

    @property
    def group_rank(self) -> int:
        """This rank's place in its engine's tensor-parallel group."""
        return self.rank % self.tensor_parallel_size

    @property
    def group_ranks(self) -> list[int]:
        """The global ranks of this engine's tensor-parallel group."""
        first = self.replica * self.tensor_parallel_size
        return list(range(first, first + self.tensor_parallel_size))

    def gather(self, value: T, what: str) -> list[T]:
        """Every rank's value, in rank order. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.wait(what):
            dist.all_gather_object(values, value)
        return values

    def gather_in_group(self, value: T, what: str) -> list[T]:
        """Each value of this engine's tensor-parallel group, in rank order. Collective over the group."""
        if self.tensor_parallel_size == 1:
            return [value]
        values: list[Any] = [None] * self.tensor_parallel_size
        with self.wait(what, self.group_ranks):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def sum(self, values: dict[str, float], what: str) -> dict[str, float]:
        """Sums over ranks by name, in rank order so that they repeat bit for bit. Collective."""
        rows = self.gather(values, what)
        return {name: sum(row[name] for row in rows) for name in rows[0]}

    def max(self, value: float, what: str) -> float:
        """The largest over ranks. Collective."""
        return max(self.gather(value, what))

    def any(self, flag: bool, what: str) -> bool:
        """True on every rank if it is true on one. Collective."""
        return any(self.gather(flag, what))

    def from_main(self, make: Callable[[], T], what: str) -> T:
        """What `make` returns on rank 0, on every rank; if it raises there, every rank raises. Collective."""
        return self.agreed(lambda: make() if self.is_main else None, what)[0]  # type: ignore[return-value]

    def agreed(self, do: Callable[[], T], what: str) -> list[T]:
        """Run `do` on every rank and return what each returned; if one raises, all raise. Collective.

        No collective belongs into `do`: a rank that raises leaves it early, and the others would wait in it.

        Raises:
            ValueError: `do` raised one (bad input); the message is the first such rank's.
            RuntimeError: `do` raised anything else; the message names the rank. The rank that failed
                raises its own exception instead, so that its traceback is the one that is shown.
        """
        result, error = None, None
        try:
            result = do()
        except Exception as raised:  # noqa: BLE001 - raised again below, once every rank knows
            error = raised
        message = None if error is None else f"{type(error).__name__}: {error}"
        try:
            rows = self.gather((result, message, type(error) is ValueError), what)
        except Exception as lost:
            if error is not None:
                raise error from lost  # what went wrong first is what matters
            raise
        failed = [(rank, said, is_input) for rank, (_, said, is_input) in enumerate(rows) if said]
        if not failed:
            return [row[0] for row in rows]  # type: ignore[misc]
        if error is not None:
            raise error
        rank, said, is_input = failed[0]
        if is_input:
            raise ValueError(said.removeprefix("ValueError: "))
        self.give_way(rank)
        raise RuntimeError(f"{what} failed on rank {rank}: {said}")

    def give_way(self, rank: int) -> None:
        """Before raising about what went wrong on `rank`, let that rank end first: torchrun blames the first."""
        if rank != self.rank:
            time.sleep(GIVE_WAY_S)

    def report(self, place: str, progress: str = "") -> None:
        """Say where this rank is, and how far, for the ranks that wait for it; cheap to call often."""
        now = time.monotonic()
        if place != self._place or now - self._reported_at >= PROGRESS_EVERY_S:
            self._place, self._reported_at = place, now
            self.store.set(f"progress/{self.rank}", f"{place}, {progress}" if progress else place)

    @contextmanager
    def wait(self, what: str, members: list[int] | None = None) -> Iterator[None]:
        """Around a collective over `members` (default all): after notice_s, log who has not arrived."""
        members = members or list(range(self.world_size))
        self._arrivals[len(members)] = self._arrivals.get(len(members), 0) + 1
        key = f"{what}#{len(members)}#{self._arrivals[len(members)]}"  # the same on each member
        self.store.set(f"arrived/{self.rank}", key)
        done = threading.Event()
        others = [rank for rank in members if rank != self.rank]
        watcher = threading.Thread(target=self._watch, args=(done, what, key, others), daemon=True)
        watcher.start()
        yield
        done.set()
        watcher.join()

    def _watch(self, done: threading.Event, what: str, key: str, others: list[int]) -> None:
        while not done.wait(self.notice_s):
            late = [rank for rank in others if self._read(f"arrived/{rank}") != key]
            told = ", ".join(f"rank {rank} in {self._read(f'progress/{rank}') or 'an unknown place'}" for rank in late)
            logger.warning("rank %d: %s: waiting for %s", self.rank, what, told or "the network")

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def start_ranks(*, tensor_parallel_size: int = 1, timeout_s: float = 7200.0, notice_s: float = 30.0) -> Ranks:
    """Join the process group that torchrun describes. Collective.

    Raises:
        RuntimeError: torchrun's variables are missing, or this host has fewer GPUs than ranks.
    """
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing:
        raise RuntimeError(f"start this with torchrun (or `colo train`): {', '.join(missing)} not set")
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda = torch.cuda.is_available()
    if cuda and local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"ranks per host must be at most its number of GPUs {torch.cuda.device_count()}, "
            f"got local rank {local_rank}"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store, _, _ = next(rendezvous("env://"))
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=PrefixStore("default", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        tensor_parallel_size=1,
        notice_s=notice_s,
        store=PrefixStore("colo", store),
    )
    join_engine_group(ranks, tensor_parallel_size, timeout_s)
    return ranks


def join_engine_group(ranks: Ranks, tensor_parallel_size: int, timeout_s: float) -> None:
    """Make one gloo group per engine: consecutive ranks, as vLLM forms them. Collective.

    `timeout_s` holds for the default group too, which was made before the recipe was read.
    """
    ranks.tensor_parallel_size = tensor_parallel_size
    timeout = datetime.timedelta(seconds=timeout_s)
    _set_pg_timeout(timeout)
    if tensor_parallel_size == 1:
        return
    for first in range(0, ranks.world_size, tensor_parallel_size):
        members = list(range(first, first + tensor_parallel_size))
        group = dist.new_group(members, backend="gloo", timeout=timeout)  # every rank makes every group
        if ranks.rank in members:
            assert isinstance(group, dist.ProcessGroup), f"rank {ranks.rank} must be in the group of its engine"
            ranks.group = group


def stop_ranks() -> None:
    """Leave the process group. On success only: leaving while an error propagates makes the others fail first."""
    if dist.is_initialized():  # vLLM's own teardown may have left it already
        dist.destroy_process_group()
