"""What the engine's phases cost, by metric name, until somebody takes it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Timings:
    """Sums of seconds, bytes and counts since the last `take`."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, values: dict[str, float]) -> None:
        """Add to the sums."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds that the block takes."""
        started = time.perf_counter()
        yield
        self.add({name: time.perf_counter() - started})

    def take(self) -> dict[str, float]:
        """The sums, which start anew."""
        sums, self._sums = self._sums, {}
        return sums
