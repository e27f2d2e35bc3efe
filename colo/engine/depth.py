"""How deep the engine sleeps while the policy updates: what each depth keeps, and which one `auto` takes."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from colo.ranks import Ranks

logger = logging.getLogger(__name__)
AUTO = "auto"
SHALLOW_FIRST = ("none", "kv", "2")
"""What `auto` tries. Depth 1 holds as much of the device as 2, and takes longer."""
GIB = 1 << 30
NUM_UPDATES_SEEN = 2
"""Before it chooses: the first update makes the optimizer's state, so its peak is not yet that of the others."""


@dataclass(frozen=True, kw_only=True)
class UpdatePeak:
    """What one rank's device held at the peak of an update, in bytes."""

    used: int
    """By everybody."""
    capacity: int
    """Of the device."""
    mapped: int
    """Of `used`: the engine's weights and KV cache, as far as they were mapped."""
    activations: int
    """Of `used`: what grows with the tokens of a micro-batch."""
    gradients: int
    """Of `used`: at the end of a backward pass."""
    num_tokens: int
    """Of this rank's largest micro-batch; 0 where it had none."""
    num_micro_batches: int
    """Of this rank's largest minibatch."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the depths have to fit into, in bytes, of the rank that has least."""

    left: int
    """Of the device, beside the largest update seen and the margin, with nothing of the engine's mapped."""
    weights: int
    """Of the engine, where they are most."""
    kv_cache: int

    def after(self, depth: str) -> int:
        """What is left of it beside an engine that sleeps at `depth`; negative where it does not fit."""
        return self.left - (self.weights if depth in ("none", "kv") else 0) - (self.kv_cache if depth == "none" else 0)


def shallowest(room: Room) -> str:
    """The first depth that leaves the update its room; the deepest where none does."""
    return next((depth for depth in SHALLOW_FIRST if room.after(depth) >= 0), SHALLOW_FIRST[-1])


class LargestUpdate:
    """The largest update that this rank has seen, without what the engine had mapped."""

    def __init__(self, margin_bytes: int) -> None:
        self._margin = margin_bytes
        self._capacity: int | None = None
        self._needed = 0
        self._num_tokens = 0
        """Of the largest micro-batch; what follows was seen with it."""
        self._needed_with_it = 0
        self._activations = 0

    def add(self, peak: UpdatePeak) -> None:
        """Take an update's peak into account."""
        # The first micro-batch of a step has no gradients under its peak, every later one has: a step of several, which
        # may come yet, needs them on top. The ledger cannot tell at a peak, and counts them out of the activations.
        unseen = peak.gradients if peak.num_micro_batches <= 1 else 0
        needed = peak.used - peak.mapped + unseen
        self._capacity = peak.capacity
        self._needed = max(self._needed, needed)
        if peak.num_tokens > self._num_tokens:
            self._num_tokens, self._needed_with_it = peak.num_tokens, needed
            self._activations = peak.activations + unseen

    def left(self, num_tokens: int = 0) -> int | None:
        """Bytes beside the largest update, or beside one whose largest micro-batch has more tokens, and the margin.

        Of the activations some part does not grow with the tokens; all of it is taken to. None before the first update.
        """
        if self._capacity is None:
            return None
        needed = self._needed
        if num_tokens > self._num_tokens > 0:
            more = self._activations * (num_tokens / self._num_tokens - 1)
            needed = max(needed, int(self._needed_with_it + more))
        return self._capacity - self._margin - needed


class AutoDepth:
    """The depth that `engine.sleep=auto` takes: 2 until it has seen updates, then the shallowest that fits."""

    def __init__(self, ranks: Ranks, margin_bytes: int) -> None:
        self._ranks = ranks
        self._largest = LargestUpdate(margin_bytes)
        self._num_updates = 0
        self.depth = SHALLOW_FIRST[-1]

    def add(self, peak: UpdatePeak, weights: int, kv_cache: int) -> None:
        """Choose anew, by an update that is over and what the engine holds when it is awake, in bytes. Collective."""
        if not self._ranks.any(peak.num_tokens > 0, "choosing the depth of sleep"):
            return  # no rank trained, so that not even the optimizer's state was made
        self._largest.add(peak)
        self._num_updates += 1
        if self._num_updates < NUM_UPDATES_SEEN:
            return
        room = self._agreed(self._largest.left(), weights, kv_cache)
        depth = shallowest(room)
        if depth != self.depth or self._num_updates == NUM_UPDATES_SEEN:
            logger.info("%s", explained(depth, room))  # shown by rank 0 alone
        self.depth = depth

    def for_update(self, num_tokens: int, weights: int, kv_cache: int) -> str:
        """The depth, or a deeper one where micro-batches of `num_tokens` would not fit beside it. Collective."""
        if self.depth == SHALLOW_FIRST[-1]:
            return self.depth
        room = self._agreed(self._largest.left(num_tokens), weights, kv_cache)
        return max(self.depth, shallowest(room), key=SHALLOW_FIRST.index)

    def _agreed(self, left: int | None, weights: int, kv_cache: int) -> Room:
        assert left is not None, "a depth must be chosen only after an update"
        rows = self._ranks.gather((left, weights, kv_cache), "choosing the depth of sleep")
        left, weights, kv_cache = min(row[0] for row in rows), max(row[1] for row in rows), max(row[2] for row in rows)
        return Room(left=left, weights=weights, kv_cache=kv_cache)


def capacity_bytes(device: torch.device) -> int:
    """What a rank may use: its card, or on CPU its share of the memory of its host or container."""
    if device.type != "cpu":
        return torch.cuda.mem_get_info()[1]
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups of version 2, and of 1
        path = Path("/sys/fs/cgroup") / name
        if path.is_file() and path.read_text().strip() != "max":
            limits.append(int(path.read_text()))
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def explained(depth: str, room: Room) -> str:
    """Why `auto` takes a depth, in one line."""
    gib = [f"{value / GIB:.2f}" for value in (room.weights, room.kv_cache, room.left)]
    return (
        f"engine.sleep=auto takes depth {depth}: beside the largest update and the margin there are {gib[2]} GiB, "
        f"the engine's weights take {gib[0]} and its KV cache {gib[1]}"
    )
