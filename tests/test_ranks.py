"""What ranks say to each other: reduced values, failures that all know of, and who is waited for."""

import logging
import os
import signal
import threading
import time
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_group

from colo.ranks import Ranks, join_engine_group
from colo.stop import StopRequest
from tests.ranks import run_ranks


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _fails_on_rank_1(ranks: Ranks, error: Exception) -> int:
    if ranks.rank == 1:
        raise error
    return ranks.rank


def _refusal(ranks: Ranks, error: Exception) -> str:
    try:
        ranks.agreed(lambda: _fails_on_rank_1(ranks, error), "reading")
    except (ValueError, RuntimeError, KeyError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "no error"


def _talk(ranks: Ranks) -> dict[str, Any]:
    said: dict[str, Any] = {
        "gather": ranks.gather(10 * ranks.rank, "gathering"),
        "sum": ranks.sum({"a": 1.0 + ranks.rank}, "adding"),
        "max": ranks.max(ranks.rank, "comparing"),
        "any": [ranks.any(ranks.rank == 1, "asking"), ranks.any(False, "asking")],
        "from_main": ranks.from_main(lambda: f"rank {ranks.rank}", "telling"),
        "input": _refusal(ranks, ValueError("seed must be at least 0, got -1")),
        "other": _refusal(ranks, KeyError("lost")),
    }
    ranks.gather(None, "meeting again")  # rank 0 gave way to rank 1
    records = _Records()
    logging.getLogger("colo.ranks").addHandler(records)
    ranks.notice_s = 0.5
    if ranks.rank == 1:
        ranks.report("rollout", "3 of 8 done")
        time.sleep(2)
    ranks.gather(None, "step 4: scoring")
    said["waited"] = records.lines
    join_engine_group(ranks, 1, 77.0)
    said["timeout"] = _get_default_group()._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return said


def test_ranks_agree_and_say_what_they_wait_for() -> None:
    main, other = run_ranks(_talk)
    for said in (main, other):
        assert said["gather"] == [0, 10]
        assert said["sum"] == {"a": 3.0}
        assert said["max"] == 1
        assert said["any"] == [True, False]
        assert said["from_main"] == "rank 0"
        assert said["input"] == "ValueError: seed must be at least 0, got -1"
        assert said["timeout"] == 77.0
    assert main["other"] == "RuntimeError: reading failed on rank 1: KeyError: 'lost'"
    assert other["other"] == "KeyError: 'lost'", "the rank that failed shows its own error"
    assert "rank 0: step 4: scoring: waiting for rank 1 in rollout, 3 of 8 done" in main["waited"]
    assert other["waited"] == [], "nobody is late for the last one"


def _stop(ranks: Ranks) -> tuple[list[bool], list[str]]:
    stop = StopRequest(ranks)
    asked = [stop.agreed()]
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)  # the thread has looked at the other ranks
    asked.append(stop.agreed())
    stop.finished()
    return asked, [thread.name for thread in threading.enumerate() if thread.name == "stop"]


def test_a_stop_is_agreed_on_and_its_thread_ends_before_the_process_does() -> None:
    for asked, threads in run_ranks(_stop):
        assert asked == [False, True]
        assert threads == [], "a daemon thread that comes back from C++ at exit aborts the process"
