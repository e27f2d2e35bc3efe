"""The policy steps aside: what it does not need while the engine generates lies in host memory."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colo.policy.optimizer import MOMENTS, local_shard

CHUNK_BYTES = 256 << 20
"""torch rounds a pinned allocation up to a power of two, so that one for each tensor would waste a third."""
GIB = 1 << 30
POISON = 0xFF
"""NaN in every floating-point dtype, byte by byte."""


class Offload:
    """Moves AdamW's moments, and with "all" the weights, between the device and host memory. Nothing with "none".

    Copies run on a stream of their own: `start_*` returns at once, and the other calls wait on the host. On CPU the
    same calls copy, free and fill again, without a stream.
    """

    def __init__(
        self,
        mode: str,
        device: torch.device,
        optimizer: torch.optim.AdamW,
        parameters: list[nn.Parameter],
        reference: list[nn.Parameter],
    ) -> None:
        """Take policy.offload, the optimizer, and the sharded parameters of the policy and of the reference."""
        self._optimizer, self._device, self._is_on = optimizer, device, mode != "none"
        self._stream = torch.cuda.Stream(device) if self._is_on and device.type == "cuda" else None
        is_all = mode == "all"
        self._weights = [Movable(parameters, self._stream)] if is_all else []
        self._reference = [Movable(reference, self._stream, is_frozen=True)] if is_all and reference else []
        self._moments: list[Movable] = []
        self._known: set[int] = set()
        self._moved_bytes = 0
        self._waited_s = {"out": 0.0, "in": 0.0}

    def start_leaving(self) -> None:
        """After an update: begin to copy to the host; everything stays where it is until it is set aside."""
        with self._timed("out"):
            self._moved_bytes += sum(group.start_out() for group in [*self._all_moments(), *self._weights])

    def set_moments_aside(self) -> None:
        """Free the moments' device memory, once they are on the host."""
        with self._timed("out"):
            self._moved_bytes += sum(group.set_aside() for group in self._all_moments())

    def set_weights_aside(self) -> None:
        """Likewise the policy's parameters and the reference's, with "all"; nobody may look at them until they return.

        Other ranks' views must be dropped: storages move, but for those in shared memory, which are overwritten.
        """
        with self._timed("out"):
            self._moved_bytes += sum(group.set_aside() for group in [*self._weights, *self._reference])

    def start_update(self) -> None:
        """Begin to bring everything back, and wait for what a forward reads."""
        with self._timed("in"):
            self._moved_bytes += sum(group.start_back() for group in [*self._weights, *self._reference, *self._moments])
            for group in (*self._weights, *self._reference):
                group.bring_back(to_change=True)

    def bring_weights_back(self, *, to_change: bool) -> None:
        """Wait until the policy's own weights are on the device, to be read, or written too."""
        with self._timed("in"):
            self._moved_bytes += sum(group.bring_back(to_change=to_change) for group in self._weights)

    def bring_moments_back(self) -> None:
        """Wait until the moments are on the device, to be read and written."""
        with self._timed("in"):
            self._moved_bytes += sum(group.bring_back(to_change=True) for group in self._moments)

    def whole_moment(self, moment: Tensor) -> Tensor:
        """A moment, whole, read where it lies: from the host it takes its own room on the device at most. Collective.

        Which is the same on every rank, as all of them call the same methods in the same order.
        """
        group = next((group for group in self._moments if group.holds(moment)), None)
        if group is None or group.place in (Place.DEVICE, Place.BOTH):
            return moment.full_tensor() if isinstance(moment, DTensor) else moment
        shard = group.read(local_shard(moment))
        if not isinstance(moment, DTensor) or moment.device_mesh.size() == 1:
            return shard
        placed = DTensor.from_local(
            shard.to(self._device),
            moment.device_mesh,
            moment.placements,
            run_check=False,
            shape=moment.shape,
            stride=moment.stride(),
        )
        return placed.full_tensor()

    def take_metrics(self) -> dict[str, float]:
        """What was moved since the last call, in GiB both ways, and the seconds that this host spent on it."""
        if not self._is_on:
            return {}
        metrics = {"offload/gib": self._moved_bytes / GIB}
        metrics |= {f"offload/{way}_s": seconds for way, seconds in self._waited_s.items()}
        self._moved_bytes, self._waited_s = 0, {"out": 0.0, "in": 0.0}
        return metrics

    def _all_moments(self) -> "list[Movable]":
        """Those there are by now: AdamW makes a parameter's in its first step with a gradient."""
        if not self._is_on:
            return []
        found = [state[name] for state in self._optimizer.state.values() for name in MOMENTS if name in state]
        fresh = [moment for moment in found if id(moment) not in self._known]
        if fresh:
            self._moments.append(Movable(fresh, self._stream))
            self._known |= {id(moment) for moment in fresh}
        return self._moments

    @contextmanager
    def _timed(self, way: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._waited_s[way] += time.perf_counter() - started


class Place(Enum):
    """Where a group of tensors is."""

    DEVICE = "device"
    BOTH = "both"
    """On the device, and the same on the host, or being copied there."""
    HOST = "host"
    RETURNING = "returning"
    """On the host, and device memory is being filled from there."""


class Movable:
    """Tensors that move together: their storages, and one copy in host memory, allocated once and pinned for a GPU.

    Tensors over the storages survive; addresses do not. Methods that move return the bytes that they set under way.
    """

    def __init__(self, tensors: Iterable[Tensor], stream: torch.cuda.Stream | None, *, is_frozen: bool = False) -> None:
        """`stream`: for the copies, None on CPU; `is_frozen`: values never change, so that one copy out is enough."""
        self._stream, self._is_frozen = stream, is_frozen
        self._flat: dict[int, Tensor] = {}
        for tensor in tensors:
            storage = local_shard(tensor).untyped_storage()
            if storage.nbytes():  # a rank may have no row
                flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
                self._flat[storage._cdata] = flat.set_(storage)  # type: ignore[arg-type]
        self._pieces: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By storage: (slice of it, slice of the host's copy)."""
        self._copied: torch.cuda.Event | None = None
        self.place = Place.DEVICE

    @property
    def num_bytes(self) -> int:
        """Of all storages."""
        return sum(flat.nbytes for flat in self._flat.values())

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor's shard is one of these."""
        return local_shard(tensor).untyped_storage()._cdata in self._flat

    def start_out(self) -> int:
        """Begin to copy to the host; until they are brought back to be changed nobody may write to the tensors."""
        if self.place is not Place.DEVICE:
            return 0
        if not self._pieces:
            self._pieces = self._laid_out()
        self._copy([(host, device) for pieces in self._pieces.values() for device, host in pieces])
        self.place = Place.BOTH
        return self.num_bytes

    def set_aside(self) -> int:
        """Free the device's memory, once the host has everything."""
        moved = self.start_out()
        if self.place is Place.HOST:
            return moved
        self._wait()
        for flat in self._flat.values():
            if _is_shared(flat):
                flat.fill_(POISON)  # torch cannot resize it, and other ranks know it by its name
            else:
                flat.untyped_storage().resize_(0)
        self.place = Place.HOST
        return moved

    def start_back(self) -> int:
        """Begin to bring them back to the device."""
        if self.place is not Place.HOST:
            return 0
        for flat in self._flat.values():
            if not _is_shared(flat):
                flat.untyped_storage().resize_(flat.numel())
        self._copy([pair for pieces in self._pieces.values() for pair in pieces])
        self.place = Place.RETURNING
        return self.num_bytes

    def bring_back(self, *, to_change: bool) -> int:
        """Bring them back to the device and wait until they are there; `to_change`: the host's copy will be stale."""
        moved = self.start_back()
        if self.place is Place.RETURNING:
            self._wait()
            self.place = Place.BOTH
        if to_change and not self._is_frozen:
            self.place = Place.DEVICE
        return moved

    def read(self, tensor: Tensor) -> Tensor:
        """A copy of one of the tensors, on the host and from there, while they are aside."""
        assert self.place in (Place.HOST, Place.RETURNING), "the host's copy must be read only while it counts"
        storage = tensor.untyped_storage()
        copy = torch.empty(0, dtype=tensor.dtype)
        if storage._cdata not in self._flat:
            return copy.reshape(tensor.shape)
        content = torch.cat([host for _, host in self._pieces[storage._cdata]]).untyped_storage()
        return copy.set_(content, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[arg-type]

    def _laid_out(self) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """The host's memory, in chunks, and which part of it each storage goes to."""
        is_pinned, left = self._stream is not None, self.num_bytes
        pieces: dict[int, list[tuple[Tensor, Tensor]]] = {key: [] for key in self._flat}
        free = torch.empty(0, dtype=torch.uint8)
        for key, flat in self._flat.items():
            done = 0
            while done < flat.numel():
                if not free.numel():
                    free = self._host_chunk(min(CHUNK_BYTES, left), is_pinned=is_pinned)
                    left -= free.numel()
                length = min(free.numel(), flat.numel() - done)
                pieces[key].append((flat[done : done + length], free[:length]))
                done, free = done + length, free[length:]
        return pieces

    def _host_chunk(self, num_bytes: int, *, is_pinned: bool) -> Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:  # which does not say that it is the host's memory
            kind = "pinned host" if is_pinned else "host"
            raise RuntimeError(
                f"policy.offload needs {self.num_bytes / GIB:.2f} GiB of {kind} memory for one group of tensors, and "
                f"this host has too little: policy.offload=none, or optimizer instead of all"
            ) from error

    @torch.no_grad()
    def _copy(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy (target, source) in turn, after what the device was asked before."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(self._stream)

    def _wait(self) -> None:
        # On the host, not on the current stream: what comes next runs on streams of FSDP2's and vLLM's too.
        if self._copied is not None:
            self._copied.synchronize()


def _is_shared(tensor: Tensor) -> bool:
    """Whether it is in shared memory, as the engine's peers on CPU have it; of a GPU's memory torch always says so."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()
