"""Who holds which elements of the policy's tensors, and whether that adds up."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from colo.types import TensorShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One rank's shard of one source, without its data; counts in elements."""

    whole_shape: tuple[int, ...]
    start: int
    """Place of the first element in the whole, in row-major order."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int | None
    """Which of its rank's storages it lies in; None where it has no element."""
    offset: int
    """Of the first element in that storage."""

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return math.prod(self.shape)


def is_whole(layouts: list[dict[str, Layout]], name: str) -> bool:
    """True where every rank holds all of a source."""
    total = math.prod(layouts[0][name].whole_shape)
    return all(rank[name].numel == total and (rank[name].start == 0 or not total) for rank in layouts)


def check_sources(layouts: list[dict[str, Layout]]) -> set[str]:
    """The sources that are whole on every rank, once all are found to be that or spread without overlap and hole."""
    names = list(layouts[0])
    for rank, others in enumerate(layouts):
        if list(others) != names:
            differs = next((pair for pair in zip(names, others, strict=False) if pair[0] != pair[1]), ("more", "fewer"))
            raise ValueError(
                f"names of the policy's tensors must be the same in one order on every rank, got {differs[0]} on "
                f"rank 0 and {differs[1]} on rank {rank} ({len(names)} and {len(others)} names)"
            )
    for name in names:
        first = layouts[0][name]
        for rank, others in enumerate(layouts):
            other = others[name]
            if (other.whole_shape, other.dtype) != (first.whole_shape, first.dtype):
                raise ValueError(
                    f"{name} must have one shape and dtype on every rank, got {first.whole_shape} {first.dtype} on "
                    f"rank 0 and {other.whole_shape} {other.dtype} on rank {rank}"
                )
    whole = {name for name in names if is_whole(layouts, name)}
    for name in names:
        if name not in whole:
            _check_partition(name, [rank[name] for rank in layouts])
    return whole


def _check_partition(name: str, parts: list[Layout]) -> None:
    total = math.prod(parts[0].whole_shape)
    spans = sorted((part.start, part.start + part.numel, rank) for rank, part in enumerate(parts) if part.numel)
    end, last, found = 0, "", ""
    for start, stop, rank in spans:
        if start < end:
            found = f"elements {start} to {min(stop, end) - 1} {last} and on rank {rank}"
        elif start > end:
            found = f"elements {end} to {start - 1} on no rank (rank {rank} has those from {start} on)"
        if found:
            break
        end, last = stop, f"on rank {rank}"
    if not found and end < total:
        found = f"elements {end} to {total - 1} on no rank ({len(spans)} of {len(parts)} ranks hold some)"
    if not found and end > total:
        found = f"elements up to {end - 1} {last}"
    if found:
        raise ValueError(
            f"shards of {name} must hold each of its {total} elements once, or all of them on every rank, got {found}"
        )


def check_local(name: str, local: Tensor, device: torch.device) -> None:
    """Raises ValueError where no other rank could read the shard."""
    if local.device.type != device.type or local.layout != torch.strided or 16 % local.dtype.itemsize:
        raise ValueError(
            f"{name} must be a dense tensor on {device.type} with elements of 1 to 16 bytes, got "
            f"{local.layout} on {local.device} of {local.dtype}"
        )


def fingerprint(handed: dict[str, TensorShard]) -> list[tuple[object, ...]]:
    """Equal while every shard is the same piece of the same storage."""
    rows = []
    for name, shard in handed.items():
        local = shard.local
        storage = local.untyped_storage()
        place = (storage._cdata, storage.nbytes(), local.data_ptr())
        rows.append((name, shard.shape, shard.start, local.shape, local.stride(), local.dtype, *place))
    return rows


def lay_out(handed: dict[str, TensorShard]) -> tuple[dict[str, Layout], list[torch.UntypedStorage]]:
    """This rank's layouts, and the distinct storages that they count."""
    layouts, numbers, storages = {}, {}, []
    for name, shard in handed.items():
        local, number = shard.local, None
        if local.numel():
            storage = local.untyped_storage()
            number = numbers.setdefault(storage._cdata, len(storages))
            if number == len(storages):
                storages.append(storage)
        layouts[name] = Layout(
            whole_shape=tuple(shard.shape),
            start=shard.start,
            shape=tuple(local.shape),
            stride=tuple(local.stride()),
            dtype=local.dtype,
            storage=number,
            offset=int(local.storage_offset()),
        )
    return layouts, storages
