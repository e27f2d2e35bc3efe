"""What a benchmark measures: one row for each way, timed on all ranks together."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from colo.ranks import Ranks


@dataclass(kw_only=True)
class Row:
    """One way, as it was measured: of each run the slowest rank's time."""

    name: str
    bytes: int
    """That it must read and write, together: casts in between and other detours are not counted."""
    ms: list[float] = field(default_factory=list)
    """From the call until the device was done."""
    device_ms: list[float] = field(default_factory=list)
    """By the device's own clock, while it is not waiting for calls; on CUDA, where the whole way runs on the device."""
    failed: str = ""

    @property
    def median_ms(self) -> float:
        """By the host's clock."""
        return statistics.median(self.ms)

    def share_of(self, limit: "Row") -> float:
        """Its bytes per second, of the limit's: by the device's clock where both have it."""
        times = (self.device_ms, limit.device_ms) if self.device_ms and limit.device_ms else (self.ms, limit.ms)
        mine, best = (statistics.median(found) for found in times)
        return (self.bytes / mine) / (limit.bytes / best)

    def numbers(self, limit: "Row", replay: "Row") -> dict[str, Any]:
        """For JSON."""
        if self.failed:
            return {"name": self.name, "failed": self.failed}
        return {
            "name": self.name,
            "bytes": self.bytes,
            "ms": self.ms,
            "device_ms": self.device_ms,
            "median_ms": self.median_ms,
            "worst_ms": max(self.ms),
            "gb_per_s": self.bytes / self.median_ms / 1e6,
            "share_of_limit": self.share_of(limit),
            "worst_share_of_limit": self._worst_share_of(limit),
            "times_replay": None if replay.failed else self.median_ms / replay.median_ms,
        }

    def _worst_share_of(self, limit: "Row") -> float:
        has_both = bool(self.device_ms and limit.device_ms)
        mine, median = (self.device_ms, statistics.median(self.device_ms)) if has_both else (self.ms, self.median_ms)
        return self.share_of(limit) * median / max(mine)


class Clock:
    """Times runs on all ranks together."""

    def __init__(self, ranks: Ranks, synchronize: Callable[[], None]) -> None:
        self._ranks, self._synchronize = ranks, synchronize

    def measure(self, row: Row, run: Callable[[], Any], repeats: int, *, on_device: bool = False) -> Row:
        """Fill the row, with what a way that raises says in the place of numbers. Collective."""
        try:
            run()  # kernels are compiled, and tables made, in the first run
            self._synchronize()
            row.ms = [self.once(run) for _ in range(repeats)]
            if on_device and self._ranks.device.type == "cuda":
                row.device_ms = self._by_device(run, repeats)
        except Exception as error:  # noqa: BLE001 - that a way does not work for a model is a finding, and is printed
            row.failed = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        told = self._ranks.gather((row.ms, row.device_ms, row.failed), f"timing {row.name}")
        row.failed = next((failed for _, _, failed in told if failed), "")
        row.ms, row.device_ms = (
            [max(times) for times in zip(*(rank[at] for rank in told), strict=True)] for at in (0, 1)
        )
        return row

    def once(self, run: Callable[[], Any]) -> float:
        """This rank's milliseconds from the call, made by all ranks together, until its device was done. Collective."""
        if self._ranks.world_size > 1:
            self._ranks.gather(None, "starting together")
        started = time.perf_counter()
        run()
        self._synchronize()
        return (time.perf_counter() - started) * 1e3

    def _by_device(self, run: Callable[[], Any], repeats: int) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for _ in range(3):  # so that the device has work before the first event, and never waits for the next call
            run()
        for start, end in pairs:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]
