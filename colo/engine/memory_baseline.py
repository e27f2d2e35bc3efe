"""What was in use before the engine: other processes, this process's context, communication."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from colo.ranks import Ranks

logger = logging.getLogger(__name__)
STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Bytes in use before the engine was built; on CPU those of this process, whose context the ledger finds itself."""

    other_processes: int = 0
    """By others, and what the driver keeps for itself: as they were at the start."""
    context: int = 0
    """Of CUDA, before kernels are loaded."""
    communication: int = 0
    """What joining the process group took."""
    num_ranks: int = 1


class BaselineWatch:
    """Measures a `Baseline` around `start_ranks`: made before it, `finish` after it.

    Before this process has a context, what others hold is known from NVML alone. Where there is none (no driver
    library, a slice of a card), it is taken as 0 and counts as context; the log says so.
    """

    def __init__(self) -> None:
        """On CUDA this makes the context, on the card of LOCAL_RANK."""
        if not torch.cuda.is_available():
            self._used = resident_bytes()["VmRSS"]
            return
        free = _free_by_uuid()
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        free_now, total = torch.cuda.mem_get_info()
        self._used = total - free_now
        # By the uuid that torch tells of its device: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER renumber cards.
        before = free.get(f"GPU-{torch.cuda.get_device_properties().uuid}")
        if before is None:
            logger.warning("NVML does not tell of this card: what other processes hold counts as memory_gib/*/context")
        # Against CUDA's total, which leaves out what the driver reserves and NVML counts.
        self._others = 0 if before is None else min(self._used, max(0, total - before))

    def finish(self, ranks: Ranks) -> Baseline:
        """What `start_ranks` added, beside what was there before it."""
        if ranks.device.type == "cpu":
            joined = max(0, resident_bytes()["VmRSS"] - self._used)
            return Baseline(communication=joined, num_ranks=ranks.world_size)
        free, total = torch.cuda.mem_get_info()
        return Baseline(
            other_processes=self._others,
            context=self._used - self._others,
            communication=max(0, total - free - self._used),
            num_ranks=ranks.world_size,
        )


def resident_bytes() -> dict[str, int]:
    """This process's VmRSS (in memory now), VmHWM (at the most) and RssShmem (of it shared memory)."""
    found = {}
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM", "RssShmem"):
            found[name] = int(value.split()[0]) << 10
    return found


@contextmanager
def nvml() -> Iterator[Any]:
    """NVML's bindings, started; None where this machine has no NVML.

    vLLM has a copy of NVIDIA's own. It is loaded from its file: an import would read vLLM's environment.
    """
    spec = importlib.util.find_spec("vllm")  # of a top-level name: imports nothing
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / "third_party" / "pynvml.py" if folders else None
    if path is None or not path.is_file():
        yield None
        return
    found = importlib.util.spec_from_file_location("colo_pynvml", path)
    assert found is not None, f"{path} must be a Python file"
    assert found.loader is not None, f"{path} must be a Python file"
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # it looks itself up by its name
    found.loader.exec_module(module)
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        logger.info("no NVML: %s", error)
        yield None
        return
    try:
        yield module
    finally:
        module.nvmlShutdown()


def _free_by_uuid() -> dict[str, int]:
    """Free bytes of each card of this host; empty without NVML."""
    with nvml() as library:
        if library is None:
            return {}
        try:
            cards = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
            return {library.nvmlDeviceGetUUID(card): library.nvmlDeviceGetMemoryInfo(card).free for card in cards}
        except library.NVMLError as error:  # a card that is cut into slices tells only its owner
            logger.info("NVML does not tell of memory: %s", error)
            return {}
