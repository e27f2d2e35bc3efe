"""What torch and NVML say of this host's GPUs, without a context on any of them in this process."""

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colo.commands.doctor_checks import Card, Cards
from colo.commands.doctor_host import Holder
from colo.engine.memory_baseline import nvml

QUESTION = """
import json, sys, torch
found = {"cuda": torch.version.cuda or "", "nccl": "", "cards": []}
if torch.cuda.is_available():
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else ""
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found["cards"].append([f"GPU-{torch.cuda.get_device_properties(index).uuid}", total, total - free])
sys.stdout.write(json.dumps(found))
"""
"""Asked in a process of its own, which has a context on each card while it runs."""
LIMIT_S = 120.0


def read_cards() -> Cards:
    """The GPUs that torch sees on this host, and their driver; none, where there is no NVIDIA driver."""
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        return Cards()
    told = _by_nvml()
    try:
        ran = subprocess.run(
            [sys.executable, "-c", QUESTION], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Cards(broken=f"torch does not answer within {LIMIT_S:g} s whether it sees a GPU")
    if ran.returncode:
        return Cards(broken=f"torch cannot say what GPUs it sees: {(ran.stderr.splitlines() or ['no word'])[-1]}")
    found: dict[str, Any] = json.loads(ran.stdout)
    used: Mapping[str, int] = told["used"]
    return Cards(
        cuda=found["cuda"],
        driver_cuda=_driver_cuda(),
        driver=told["driver"],
        nccl=found["nccl"],
        # NVML's count, from before the process above held its own; a slice of a card is told by torch alone.
        cards=tuple(Card(uuid=uuid, total=total, used=used.get(uuid, own)) for uuid, total, own in found["cards"]),
        num_on_host=max(told["num"], len(found["cards"])),
    )


def _driver_cuda() -> int:
    """What the driver's own library says that it supports, which needs no context; 0 where there is none."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:  # it is not there
        return 0
    return 0 if failed else version.value


def _by_nvml() -> dict[str, Any]:
    """Driver's version, number of cards, and used bytes by uuid; what NVML does not tell is left out."""
    found: dict[str, Any] = {"driver": "", "num": 0, "used": {}}
    with nvml() as library:
        if library is None:
            return found
        found["driver"] = library.nvmlSystemGetDriverVersion()
        found["num"] = library.nvmlDeviceGetCount()
        for index in range(found["num"]):
            try:
                card = library.nvmlDeviceGetHandleByIndex(index)
                memory = library.nvmlDeviceGetMemoryInfo(card)
                found["used"][library.nvmlDeviceGetUUID(card)] = memory.used
            except library.NVMLError:  # a card that is cut into slices tells only its owner; torch tells of the slice
                continue
    return found


def holders_of(card: Card) -> list[Holder]:
    """The processes with memory on a card, largest first; in a container NVML may see none."""
    with nvml() as library:
        if library is None:
            return []
        try:
            handle = library.nvmlDeviceGetHandleByUUID(card.uuid)
            running = library.nvmlDeviceGetComputeRunningProcesses(handle)
        except library.NVMLError:  # not told: then `card_memory` says that nobody is seen
            return []
    found = [Holder(pid=one.pid, name=_name_of(one.pid), used=one.usedGpuMemory or 0) for one in running]
    return sorted(found, key=lambda holder: -holder.used)


def _name_of(pid: int) -> str:
    path = Path(f"/proc/{pid}/cmdline")
    if not path.is_file():
        return "a process of another container"
    words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    return " ".join(words)[:60] or "a kernel thread"
