"""Start the real command in processes of its own, watch what it writes, and end what it started."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
TIMED = ("time_s/", "switch/", "memory_gib/")
"""Metrics that no two runs share."""
FAST = ["rollout.num_prompts=4", "rollout.group_size=2", "rollout.max_new_tokens=8", "tracking.tensorboard=false"]
"""Steps of a fraction of a second."""


class Launch:
    """One `colo` command under way, and every process below it."""

    def __init__(self, run_dir: Path, *arguments: str, command: str = "train", recipe: str = "debug") -> None:
        self.run_dir = run_dir
        self.log = run_dir.with_suffix(f".{time.monotonic_ns()}.log")
        words = [sys.executable, "-m", "colo.cli", command, "--config-name", recipe, f"run_dir={run_dir}", *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

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
        deadline = time.monotonic() + timeout_s
        while not any(row["step"] >= step for row in read_rows(self.run_dir)):
            assert self.process.poll() is None, f"ended before step {step}:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"no step {step} after {timeout_s} s:\n{self.output[-4000:]}"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL to every process at once, as a power cut would."""
        processes = self.descendants()
        self.process.send_signal(signal.SIGKILL)
        for process in processes:
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


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; a line that is being written is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    return [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in read_rows(run_dir)]
