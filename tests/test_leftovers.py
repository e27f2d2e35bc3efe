"""Nothing grows and nothing stays: memory, open files, processes and /dev/shm, over a run, at its end, after kills."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from colo.checkpoint import find_damage, list_checkpoints
from tests.launch import ENDLESS, FAST, WHOLE, Launch, numbers, read_rows

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
NUM_STEPS = 50
EARLY, LATE = range(2, 12), range(NUM_STEPS - 11, NUM_STEPS - 1)
"""Steps that are compared; the last one is left out, since the process ends after it."""
SETTLING_BYTES = 6 * MIB
"""By which a rank may grow in between: over the first hundred steps glibc's heap does so by 4 MiB, then no more."""
LEFT_AT_EXIT = ("traceback", "error", "leaked", "exception ignored")
"""What a program says on stderr that did not end well."""


@dataclass
class Held:
    """What one rank held during one step, over many looks at it."""

    least_bytes: int = 1 << 62
    """Resident; asleep."""
    most_bytes: int = 0
    """Awake."""
    num_files: int = 1 << 62
    """At least; a look may fall into the writing of a checkpoint."""
    num_threads: int = 1 << 62

    def add(self, process: psutil.Process) -> None:
        """Look once more."""
        resident = process.memory_info().rss
        self.least_bytes, self.most_bytes = min(self.least_bytes, resident), max(self.most_bytes, resident)
        self.num_files = min(self.num_files, process.num_fds())
        self.num_threads = min(self.num_threads, process.num_threads())


@dataclass
class Watched:
    """A launch, looked at until its end."""

    steps: list[dict[int, Held]] = field(default_factory=list)
    """Of each rank, by step."""
    shared: set[Path] = field(default_factory=set)
    """Entries of /dev/shm that its processes had."""
    processes: list[psutil.Process] = field(default_factory=list)

    def over(
        self, rank: int, steps: Iterable[int], read: Callable[[Held], int], pick: Callable[[list[int]], int]
    ) -> int:
        """The least or the most of a value of a rank over some steps."""
        return pick([read(self.steps[rank][step]) for step in steps if step in self.steps[rank]])


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """The entries of /dev/shm that processes have mapped or open, or that are named after one."""
    found = set()
    for process in processes:
        found |= set(SHARED_MEMORY.glob(f"*_{process.pid}_*"))
        try:
            mapped = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            files = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        except OSError:  # it has ended
            continue
        paths = [line[line.index("/") :] for line in mapped if f" {SHARED_MEMORY}/" in line] + files
        found |= {Path(path) for path in paths if path.startswith(f"{SHARED_MEMORY}/") and "(deleted)" not in path}
    return found


def watch(launch: Launch) -> Watched:
    """Look at the ranks every few milliseconds until the launch has ended."""
    launch.wait_for_step(0)
    ranks, log = launch.ranks(), launch.run_dir / "metrics.jsonl"
    processes = launch.descendants()
    watched = Watched(shared=shared_memory_of(processes), processes=processes)
    watched.steps = [defaultdict(Held) for _ in ranks]
    while launch.process.poll() is None:
        step = log.read_bytes().count(b"\n")
        try:
            for held, rank in zip(watched.steps, ranks, strict=True):
                held[step].add(rank)
        except psutil.Error:
            break
        time.sleep(0.005)
    return watched


def all_gone(processes: Iterable[psutil.Process], shared: Iterable[Path], timeout_s: float = 20) -> bool:
    """Whether processes have ended and files are gone in time; a process of torch's removes what the ranks left."""
    deadline = time.monotonic() + timeout_s
    _, alive = psutil.wait_procs(list(processes), timeout=timeout_s)
    while any(path.exists() for path in shared) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not alive and not any(path.exists() for path in shared)


@pytest.mark.slow
def test_over_fifty_steps_nothing_grows_and_the_end_leaves_a_whole_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launch = Launch(run_dir, *FAST, f"num_steps={NUM_STEPS}", "checkpoint_every=10")
    watched = watch(launch)
    assert launch.wait() == 0, launch.output
    assert len(read_rows(run_dir)) == NUM_STEPS
    assert len(watched.steps) == 2
    for rank in range(2):
        for read, pick in ((lambda held: held.least_bytes, min), (lambda held: held.most_bytes, max)):
            early, late = (watched.over(rank, steps, read, pick) for steps in (EARLY, LATE))
            assert late <= early + SETTLING_BYTES, f"rank {rank}: {pick} from {early / MIB:.1f} to {late / MIB:.1f} MiB"
        for read in (lambda held: held.num_files, lambda held: held.num_threads):
            early, late = (watched.over(rank, steps, read, min) for steps in (EARLY, LATE))
            assert late <= early, f"rank {rank}: from {early} to {late}"
    assert watched.shared, "the ranks of a host share the policy through memory"
    assert all_gone(watched.processes, watched.shared | shared_memory_of(watched.processes))

    last = list_checkpoints(run_dir)[-1]
    assert last.name == f"step-{NUM_STEPS}"
    assert find_damage(last) is None
    assert [word for word in LEFT_AT_EXIT if word in launch.output.lower()] == []


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["agent and ranks", "agent", "rank"])
def test_after_sigkill_no_process_and_no_shared_memory_is_left(tmp_path: Path, killed: str) -> None:
    launch = Launch(tmp_path / "run", *ENDLESS)
    launch.wait_for_step(2)
    agent, ranks = psutil.Process(launch.process.pid), launch.ranks()
    processes = [agent, *launch.descendants()]
    shared = shared_memory_of(processes)
    assert len(processes) > 3, "a process of the rewards'"
    assert shared
    for process in {"agent and ranks": [agent, *ranks], "agent": [agent], "rank": ranks[1:]}[killed]:
        process.kill()
    launch.wait(60)
    assert all_gone(processes, shared | shared_memory_of(processes), timeout_s=60)


@pytest.mark.slow
def test_two_launches_at_once_give_the_numbers_of_one_alone(tmp_path: Path, whole_run: Path) -> None:
    launches = [Launch(tmp_path / name, *WHOLE) for name in ("one", "other")]
    assert [launch.wait() for launch in launches] == [0, 0], "".join(launch.output for launch in launches)
    for launch in launches:
        assert numbers(launch.run_dir) == numbers(whole_run)
