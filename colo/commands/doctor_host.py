"""What colo doctor finds on the host: memory of the cards and of the host, shared memory, what was left there."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from colo.commands.doctor_checks import GIB, Card, Finding, note, ok, wrong
from colo.memory_plan import CONTEXT_BYTES, Plan

OWN_BYTES = 1 * GIB
"""Of a card, that the driver and displays hold on one that is free."""
PLAN_ERROR = 1.1
"""By how much the plan's peak may be too high."""
NCCL_BYTES = 1 * GIB
"""Of shared memory that several ranks on GPUs should find: containers have 64 MiB unless told otherwise."""
OWNED = re.compile(r"torch_(\d+)_")
"""Segments of torch's file_system strategy, which colo's ranks on CPU share shards by: the number is their owner's."""
NAMELESS = re.compile(r"psm_|sem\.mp-|nccl-|vllm_")
"""Those of Python's shared memory and semaphores, of NCCL and of vLLM: of nobody that the name tells."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process with memory on a card, in bytes."""

    pid: int
    name: str
    used: int


def usable_bytes(card: Card) -> int:
    """What a rank plans with: the card, less what others hold of it; its own context is part of the plan."""
    return min(card.total, card.total - card.used + CONTEXT_BYTES)


def card_memory(
    number: int, card: Card, plan: Plan | None, holders: Sequence[Holder], share: float | None = None
) -> Finding:
    """One card's free memory against what will be asked of it.

    Args:
        number: As torch counts it.
        card: As it is now.
        plan: A rank's, of the smallest card; None where there is none.
        holders: Who has memory on it, as far as they are seen.
        share: engine.vllm.gpu_memory_utilization, if given: vLLM refuses to start where less of the card is free.
    """
    free = card.total - card.used
    told = ", ".join(f"{one.name} (pid {one.pid}) {one.used / GIB:.2f} GiB" for one in holders)
    unseen = "nobody that is seen from here" if card.used > OWN_BYTES else "nobody"
    said = f"card {number}: {free / GIB:.2f} of {card.total / GIB:.2f} GiB free, held by {told or unseen}"
    if plan is not None:
        said += f"; the plan's peak is {plan.peak_bytes / GIB:.2f}"
    if share is not None and free < share * card.total:
        said += f"; vLLM will ask for gpu_memory_utilization {share:g}, {share * card.total / GIB:.2f} GiB"
        return wrong("memory", said, "end what holds it, or leave gpu_memory_utilization out")
    usable = usable_bytes(card)
    if plan is None or replace(plan, card_bytes=usable).is_possible:
        return ok("memory", said) if card.used <= OWN_BYTES else note("memory", said, "end what should not run")
    by_others = replace(plan, card_bytes=card.total).is_possible
    do = "end what holds it" if by_others else "colo plan shows which settings fit"
    return wrong("memory", said, do) if plan.peak_bytes > PLAN_ERROR * usable else note("memory", said, do)


def host_memory(needed: Mapping[str, int], available: int) -> Finding:
    """What the ranks of this host will take of its memory, by what for, against what is available, in bytes."""
    total = sum(needed.values())
    told = ", ".join(f"{what} {size / GIB:.2f}" for what, size in needed.items() if size)
    said = f"{available / GIB:.2f} GiB available, {total / GIB:.2f} needed" + (f" ({told})" if told else "")
    if total > available:
        largest = max(needed, key=lambda what: needed[what])
        return wrong("host_memory", said, f"free some, or lower what {largest} takes")
    return ok("host_memory", said)


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Of the host's memory, what processes of this control group can still take."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    left = [next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")]
    memberships = [line.split(":", 2) for line in (proc / "self/cgroup").read_text().splitlines()]
    for _, controllers, path in memberships:
        if controllers not in ("", "memory"):
            continue
        root = cgroups / controllers
        limit_name, used_name = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if not controllers:
            limit_name, used_name = ("memory.max", "memory.current")
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            limit = folder / limit_name
            if folder.is_relative_to(root) and limit.is_file() and limit.read_text().strip() != "max":
                used = int((folder / used_name).read_text()) - _reclaimable(folder / "memory.stat")
                left.append(int(limit.read_text()) - used)
    return max(0, min(left))


def _reclaimable(stat: Path) -> int:
    """Page cache that the kernel lets go of when somebody asks for memory."""
    rows = dict(line.split(maxsplit=1) for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return int(rows.get("total_inactive_file", rows.get("inactive_file", "0")))


def shared_memory(free: int, needed: int, transport: str, *, on_gpu: bool, num_ranks: int) -> Finding:
    """/dev/shm: where ranks on CPU place their shards (`needed` bytes), and NCCL its buffers."""
    said = f"/dev/shm has {free / GIB:.2f} GiB free"
    larger = "make it larger (docker run --shm-size)"
    if num_ranks == 1:
        return ok("shm", f"{said}; one rank needs none")
    if on_gpu:
        return ok("shm", said) if free >= NCCL_BYTES else note("shm", f"{said}, which NCCL may find too little", larger)
    said += f", the shards of all ranks take {needed / GIB:.2f}"
    if transport == "gather" or needed <= free:
        return ok("shm", said)
    if transport == "peer":
        return wrong("shm", said, f"{larger}, or set reload.transport=auto")
    return note("shm", f"{said}: ranks will read each other by gather, which is slower", larger)


def leftovers(shm: Path = Path("/dev/shm"), proc: Path = Path("/proc")) -> Finding:
    """Segments in shared memory whose owner is gone and that no process has mapped: a killed run leaves them."""
    entries = {path.name: path for path in shm.iterdir()}
    owners = {name: int(found.group(1)) for name in entries if (found := OWNED.match(name))}
    nameless = [name for name in entries if NAMELESS.match(name)]
    mapped, sees_all = _mapped(shm, proc) if owners or nameless else (set(), True)
    gone = {name: pid for name, pid in owners.items() if not (proc / str(pid)).exists() and name not in mapped}
    if gone:
        pids = sorted(set(gone.values()))
        size = sum(entries[name].stat().st_size for name in gone if entries[name].exists())
        said = f"{len(gone)} segments ({size / 2**20:.1f} MiB) in {shm} of {len(pids)} processes that are gone"
        numbers = ",".join(map(str, pids))
        remove = f"rm -f {shm}/torch_{numbers if len(pids) == 1 else f'{{{numbers}}}'}_*"
        return note("leftovers", said, f"{remove} (unless another container shares {shm})")
    unmapped = [name for name in nameless if name not in mapped]
    if unmapped and sees_all:
        said = f"{len(unmapped)} entries in {shm} that no process has open, such as {min(unmapped)}"
        return note("leftovers", said, f"rm -f {' '.join(f'{shm}/{name}' for name in sorted(unmapped))}")
    return ok("leftovers", f"none in {shm}")


def _mapped(shm: Path, proc: Path) -> tuple[set[str], bool]:
    """Names in `shm` that a process has mapped, and whether all processes could be looked at."""
    names, sees_all = set(), True
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            lines = (folder / "maps").read_text(errors="replace").splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        except PermissionError:
            sees_all = False
            continue
        names |= {line.partition(f"{shm}/")[2].removesuffix(" (deleted)") for line in lines if f" {shm}/" in line}
    return names, sees_all
