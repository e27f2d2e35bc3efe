"""The ledger: who holds how much of a rank's memory at each phase of a step, and what to change where it ran out."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from colo.config import Config
from colo.engine.build import VllmParts
from colo.engine.memory_baseline import Baseline
from colo.engine.memory_readings import CpuMemory, CudaMemory
from colo.engine.memory_table import GIB, PHASES, POLICY_PARTS, advice, as_metrics, in_gib, table

SAYS_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
"""In what CUDA, vLLM's allocator, NCCL, torch on CPU and cuBLAS raise, in lower case."""


class OutOfMemoryError(RuntimeError):
    """Memory ran out: the message has the ledger's table of that moment, and the settings that would make it fit."""


class Ledger:
    """Reads who holds what, at the moments that it is told of. Of this rank alone: no call is collective.

    The parts of a reading sum to its total, which the driver measured (on CPU: the kernel, for this process).
    """

    def __init__(
        self,
        parts: VllmParts,
        baseline: Baseline,
        policy_bytes: Callable[[], Mapping[str, int]],
        config: Config,
    ) -> None:
        """Note what the build left: made right after it, while everything of the engine is mapped.

        Args:
            parts: Of the engine that was just built.
            baseline: What was in use before.
            policy_bytes: The bytes that the policy holds at a time, by `POLICY_PARTS`; empty while there is none.
            config: For what to change where memory runs out.
        """
        self._memory = CpuMemory(parts.cpu_sleep, baseline) if parts.cpu_sleep else CudaMemory(baseline)
        self._policy_bytes = policy_bytes
        self._config = config
        self._last: dict[str, dict[str, int]] = {}
        self._untaken: set[str] = set()
        self._has_updated = False
        self.note("build")

    def note(self, phase: str) -> None:
        """Record what is held now, as that phase's; takes about a millisecond."""
        self._record(phase, self._memory.now(self._policy()))

    @contextmanager
    def updating(self, held_at_peak: Callable[[], Mapping[str, int]] = dict) -> Iterator[None]:
        """Around the policy's update: records its peak as the phase "update".

        Args:
            held_at_peak: Asked at the end: what the policy held at the most in between, where that is more than before
                and after, such as the gradients at the end of the backward pass.

        Raises:
            OutOfMemoryError: memory ran out inside.
        """
        before = self._policy()
        self._memory.start_peak(before)
        with self.explains("update", lambda: self._peak(before, held_at_peak)):
            yield
        if not self._has_updated:
            self._has_updated = True
            self._memory.settle(self._memory.now(self._policy())["unattributed"])
        self._record("update", self._peak(before, held_at_peak))

    @contextmanager
    def explains(self, where: str, reading: Callable[[], dict[str, int]] | None = None) -> Iterator[None]:
        """Around what may run out of memory: says then who held what, and what would make it fit.

        Args:
            where: "update", or the wake ("wake_up").
            reading: What was held then; default what is held when the error arrives here.

        Raises:
            OutOfMemoryError: memory ran out inside. Every other error goes on as it is.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:  # torch's and vLLM's are RuntimeErrors
            if isinstance(error, OutOfMemoryError) or not says_out_of_memory(error):
                raise
            phase = "update" if where == "update" else "wake"
            self._record(phase, reading() if reading else self._memory.now(self._policy()))
            raise OutOfMemoryError(self._explained(error, where, phase)) from error

    def take(self) -> dict[str, float]:
        """Metrics of the phases that were noted since the last call: `memory_gib/PHASE/PART`."""
        noted = {phase: in_gib(self._last[phase]) for phase in PHASES if phase in self._untaken}
        self._untaken.clear()
        return as_metrics(noted)

    def table(self) -> str:
        """The last reading of each phase, as a table."""
        return table({phase: in_gib(reading) for phase, reading in self._last.items()})

    def last(self, phase: str) -> dict[str, int]:
        """The last reading of a phase, in bytes: its parts and the total."""
        assert phase in self._last, f"nothing was noted yet for the phase {phase!r}"
        return dict(self._last[phase])

    def _record(self, phase: str, reading: dict[str, int]) -> None:
        assert phase in PHASES, f"the ledger has no phase {phase!r}"
        self._last[phase] = reading
        self._untaken.add(phase)

    def _policy(self) -> dict[str, int]:
        held = self._policy_bytes()
        return {part: held.get(part, 0) for part in POLICY_PARTS}

    def _peak(self, before: Mapping[str, int], held_at_peak: Callable[[], Mapping[str, int]]) -> dict[str, int]:
        rows = (before, self._policy(), held_at_peak())
        return self._memory.at_peak({part: max(row.get(part, 0) for row in rows) for part in POLICY_PARTS})

    def _explained(self, error: BaseException, where: str, phase: str) -> str:
        kv_gib = max(reading["kv_cache"] for reading in self._last.values()) / GIB
        offers = advice(in_gib(self._last[phase]), self._config, where, kv_gib=kv_gib)
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        place = "the update" if where == "update" else f"the wake ({where})"
        offered = "\n".join(f"  {offer}" for offer in offers)
        return f"out of memory in {place}: {said}\n{self.table()}\nwhat would make it fit:\n{offered}"


def says_out_of_memory(error: BaseException) -> bool:
    """Whether an error is about memory that could not be had."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(sign in said for sign in SAYS_OUT_OF_MEMORY)
