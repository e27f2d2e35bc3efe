"""Handles of memory that another process of the host can open: CUDA IPC, and shared memory on CPU."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

SHARED_MEMORY = Path("/dev/shm")
PAGE = 4096
SEGMENT_HEADER = 64
"""Bytes that torch puts before the data of a shared segment."""


def export_storage(local: Tensor) -> Any:
    """A handle of all of a tensor's storage, which any number of processes may open.

    On CPU the storage moves into shared memory, under the tensors that use it. A file's name travels, not what
    ForkingPickler makes of it: that counts one reader for each pickle, and the file would be gone after two.
    """
    storage = local.untyped_storage()
    if local.device.type == "cpu":
        if not storage.is_shared():
            _keep_files_from_children()
        return storage._share_filename_cpu_()
    return reduce_tensor(torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage))


def _keep_files_from_children() -> None:
    """Mark what this process has open to be closed in programs that it starts.

    torch starts one, torch_shm_manager, which outlives this process while others use its segments. With this rank's
    sockets open in there, the others would wait for it for ever where it was killed.
    """
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with contextlib.suppress(OSError):  # closed since it was listed, as the listing itself is
                os.set_inheritable(number, False)


def open_storage(handle: Any, device: torch.device) -> Tensor:
    """The bytes behind a handle, on this rank's device."""
    if device.type == "cpu":
        storage = torch.UntypedStorage._new_shared_filename_cpu(*handle)
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    rebuild, arguments = handle
    arguments = list(arguments)
    arguments[6] = device.index  # mapped for this GPU: for the owner's, this process would need a context on it too
    return rebuild(*arguments)


def segment_bytes(storage: torch.UntypedStorage) -> int:
    """What it takes of shared memory to place a storage there."""
    return -(-(storage.nbytes() + SEGMENT_HEADER) // PAGE) * PAGE


def free_shared_memory() -> int:
    """Bytes."""
    room = os.statvfs(SHARED_MEMORY)
    return room.f_bavail * room.f_frsize


def host_name(device: torch.device) -> str:
    """Equal on two ranks where one can open what the other exports: host names repeat, and containers split hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [str(SHARED_MEMORY.stat().st_dev)]
    if device.type == "cuda":
        spaces.append(os.readlink("/proc/self/ns/ipc"))
    return " ".join([socket.gethostname(), boot, *spaces])
