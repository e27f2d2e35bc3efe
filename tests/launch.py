"""Start the real command in processes of its own, watch what it writes, and end what it started."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import psutil

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TIMED = ("time_s/", "switch/", "memory_gib/", "offload/")
"""Metrics that no two runs share."""
FAST = ["rollout.num_prompts=4", "rollout.group_size=2", "rollout.max_new_tokens=8", "tracking.tensorboard=false"]
"""Steps of a fraction of a second."""
WHOLE = [*FAST, "num_steps=8", "checkpoint_every=3", "rollout.save=1"]
"""A run that other runs are compared with: `whole_run` in conftest.py."""
ENDLESS = [*FAST, "num_steps=100000"]
"""A run that somebody has to end."""


class Launch:
    """One of colo's programs under way, and every process below it."""

    started: ClassVar[list["Launch"]] = []
    """All of them; conftest.py ends those that a failed test leaves running."""

    def __init__(
        self,
        run_dir: Path,
        *arguments: str,
        program: tuple[str, ...] = ("colo.cli", "train"),
        recipe: str = "debug",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_suffix(f".{time.monotonic_ns()}.log")
        words = [sys.executable, "-m", *program, "--config-name", recipe, f"run_dir={run_dir}", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={**ENVIRONMENT, **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        Launch.started.append(self)

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(errors="replace")

    def descendants(self) -> list[psutil.Process]:
        """The ranks and what they started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        """The rank processes, in order."""
        found = [(p.environ().get("RANK"), p) for p in self.descendants() if "colo.train" in " ".join(p.cmdline())]
        return [process for rank, process in sorted(found, key=lambda pair: pair[0] or "") if rank is not None]

    def wait(self, timeout_s: float = 240) -> int:
        """Its exit status; a launch that outlives the limit is killed and fails the test."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output[-4000:]}") from None

    def wait_for_step(self, step: int, timeout_s: float = 240) -> None:
        """Return once metrics.jsonl has the line of `step`."""
        self.wait_until(lambda: any(row["step"] >= step for row in read_rows(self.run_dir)), f"step {step}", timeout_s)

    def wait_until(self, has_come: Callable[[], bool], what: str, timeout_s: float = 240) -> None:
        """Return as soon as `has_come`."""
        deadline = time.monotonic() + timeout_s
        while not has_come():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"no {what} after {timeout_s} s:\n{self.output[-4000:]}"
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL to every process at once, as a power cut would; nothing where it has ended.

        But for torch's own, which then removes the ranks' shared memory from this host, and ends.
        """
        if self.process.poll() is not None:
            return
        processes = self.descendants()
        killed = [process for process in processes if not process.name().startswith("torch_shm")]
        self.process.send_signal(signal.SIGKILL)
        for process in killed:
            if process.is_running():
                process.kill()
        self.process.wait()
        psutil.wait_procs(processes, timeout=10)


def train(run_dir: Path, *arguments: str, expect: int = 0, recipe: str = "debug") -> Launch:
    """Run `colo train` to its end and check its exit status."""
    launch = Launch(run_dir, *arguments, recipe=recipe)
    status = launch.wait()
    assert status == expect, f"exit status {status}, not {expect}:\n{launch.output[-6000:]}"
    return launch


def launch_ranks(run_dir: Path, *arguments: str, num_ranks: int = 2) -> list[Launch]:
    """Start the ranks themselves, as torchrun would on one host, so that each one's exit status is seen."""
    shared = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_PORT": free_port()}
    return [
        Launch(
            run_dir,
            *arguments,
            program=("colo.train",),
            environment={"MASTER_ADDR": "localhost", "RANK": str(rank), "LOCAL_RANK": str(rank)}
            | {name: str(value) for name, value in shared.items()},
        )
        for rank in range(num_ranks)
    ]


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; a line that is being written is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in read_rows(run_dir)]
