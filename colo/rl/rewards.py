"""Rewards: text in, number out. The functions run in one worker process per rank.

A process of their own, since a time limit must also end a function that is stuck in C code, and only the end of
its process does that. This file and the worker import no torch, so that a new worker starts in a fraction of a second.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

from colo.config import ScoringConfig
from colo.rl.functions import Parameters

if TYPE_CHECKING:
    from colo.types import Prompt

logger = logging.getLogger(__name__)
WORKER = """
import sys
descriptor, parent, *sys.path[:] = sys.argv[1:]  # the parent's path, so that both find the same modules
from colo.rl.reward_worker import serve
serve(int(descriptor), int(parent))
"""
IMPORT_LIMIT_S = 300.0
"""For the worker to start and to import the functions' modules, which may load something large."""
EXIT_LIMIT_S = 10.0
"""From the end of the connection to the end of the process."""


class RewardError(RuntimeError):
    """A reward function raised, ended its process, or returned no finite number."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What the reward functions gave one completion."""

    total: float
    """The weighted sum."""
    by_function: dict[str, float]
    """Dotted path to reward, before its weight."""
    timed_out: list[str]
    """Paths of the functions that were ended at scoring.timeout_s; theirs is scoring.timeout_reward."""


@dataclass(frozen=True)
class _Job:
    """One call of one function."""

    item: int
    path: str
    text: str
    fields: dict[str, Any] = field(repr=False)


class Rewards:
    """The run's reward functions, with their worker. Use as a context manager, or call `close`.

    A function is called as `function(completion_text, **fields)` with those of the prompt's fields that its signature
    names (all of them if it has **kwargs), and with `prompt`, the prompt's text, if it asks for that.

    Use it from the main thread: Linux ends the worker when the thread that started it ends.

    Args:
        weights: Dotted path to weight, as in the recipe's `reward`.
        scoring: The time limit, and the reward of a time-out.
    """

    def __init__(self, weights: dict[str, float], scoring: ScoringConfig) -> None:
        self.weights = weights
        self.scoring = scoring
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._parameters: dict[str, Parameters] = {}

    def __enter__(self) -> "Rewards":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """The functions' dotted paths, in the recipe's order."""
        return list(self.weights)

    def close(self) -> None:
        """End the worker and what it started; a later call starts a new one."""
        if self._process is None:
            return
        assert self._connection is not None
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the worker leads a group: a reward's own children end too
        self._process.kill()
        self._process.wait()
        self._process = self._connection = None

    def check(self, prompts: Sequence["Prompt"], option: str) -> None:
        """Refuse at start what `score` could not do later.

        Args:
            prompts: All that may be scored.
            option: The recipe's option that holds them, for the error.

        Raises:
            ValueError: a path that does not import, a function that cannot be called so, or a prompt (by its line)
                that lacks a field which a function needs.
        """
        self._start()
        for prompt in prompts:
            offered = _offered(prompt)
            for path, parameters in self._parameters.items():
                missing = [name for name in parameters.required if name not in offered]
                if missing:
                    raise ValueError(
                        f"{option} must have the fields that reward function {path} needs: {', '.join(missing)}, "
                        f"got {', '.join(prompt.fields) or 'none'} on line {prompt.row + 1}"
                    )

    def score(
        self, items: Sequence[tuple["Prompt", str]], progress: Callable[[int, int], None] | None = None
    ) -> list[Score]:
        """Score completions.

        Args:
            items: (prompt, completion text).
            progress: Called after each result with the calls done and the calls in all.

        Returns:
            One score per item, in order. A call that takes longer than scoring.timeout_s is ended and recorded.

        Raises:
            RewardError: a function raised, ended its process, or returned no finite number; says which, with the
                prompt's line, the completion, and the function's own traceback.
        """
        self._start()
        jobs = [
            _Job(item, path, text, parameters.choose(_offered(prompt)))
            for item, (prompt, text) in enumerate(items)
            for path, parameters in self._parameters.items()
        ]
        try:
            results = self._run(jobs, items, progress)
        except BaseException:
            self.close()  # it is in the middle of a list that nobody reads on
            raise
        by_item: list[dict[str, float | None]] = [{} for _ in items]
        for job, result in zip(jobs, results, strict=True):
            by_item[job.item][job.path] = result
        return [self._add_up(by_function) for by_function in by_item]

    def _add_up(self, results: dict[str, float | None]) -> Score:
        timed_out = [path for path, result in results.items() if result is None]
        missing = self.scoring.timeout_reward
        by_function = {path: missing if result is None else result for path, result in results.items()}
        total = sum(weight * by_function[path] for path, weight in self.weights.items())
        return Score(total=total, by_function=by_function, timed_out=timed_out)

    def _run(
        self, jobs: list[_Job], items: Sequence[tuple["Prompt", str]], progress: Callable[[int, int], None] | None
    ) -> list[float | None]:
        """One result per job; None for a time-out, after which the rest goes to a new worker."""
        results: list[float | None] = []
        is_sent = False
        while len(results) < len(jobs):
            if not is_sent:
                self._send(jobs[len(results) :])
            job = jobs[len(results)]
            is_sent = self._has_answered(self.scoring.timeout_s)
            if is_sent:
                results.append(self._result(job, items[job.item][0]))
            else:
                logger.warning("%s took longer than scoring.timeout_s %g", job.path, self.scoring.timeout_s)
                self.close()
                results.append(None)
            if progress is not None:
                progress(len(results), len(jobs))
        return results

    def _send(self, jobs: list[_Job]) -> None:
        self._start()
        assert self._connection is not None
        try:
            self._connection.send([(job.path, job.text, job.fields) for job in jobs])
            self._receive(IMPORT_LIMIT_S)  # it has read them: from here on time is the functions'
        except (EOFError, ConnectionError) as error:
            raise RewardError(
                f"the process of the reward functions ended between calls: {self._exit_status()}"
            ) from error

    def _result(self, job: _Job, prompt: "Prompt") -> float:
        value: Any
        try:
            kind, value = self._receive(0.0)
        except (EOFError, ConnectionError):
            kind, value = "ended its process", self._exit_status()
        if kind == "value":
            return value
        raise RewardError(
            f"reward function {job.path} {kind} on prompt line {prompt.row + 1}\ncompletion: {job.text!r}\n{value}"
        )

    def _start(self) -> None:
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._connection = Connection(ours.detach())
            self._process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(theirs.fileno()), str(os.getpid()), os.getcwd(), *sys.path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints is for a person, and must not mix with ours
                env={**os.environ, "PYTHONHASHSEED": "0"},  # an order of a set is no matter of chance
                start_new_session=True,  # SIGTERM reaches a rank's whole group, and its last step still needs rewards
            )
        try:
            self._connection.send(list(self.weights))
            found = self._receive(IMPORT_LIMIT_S)
        except (EOFError, ConnectionError):
            found = f"reward must be functions whose modules import, got {self._exit_status()} of the process that did"
        except TimeoutError:
            found = f"reward must be functions that import within {IMPORT_LIMIT_S:g} s, got {', '.join(self.weights)}"
        if isinstance(found, str):
            self.close()
            raise ValueError(found)
        self._parameters = found

    def _receive(self, limit_s: float) -> Any:
        if not self._has_answered(limit_s):
            raise TimeoutError(f"the reward worker must answer within {limit_s:g} s")
        assert self._connection is not None
        return self._connection.recv()

    def _has_answered(self, limit_s: float) -> bool:
        assert self._connection is not None
        return self._connection.poll(limit_s)

    def _exit_status(self) -> str:
        assert self._process is not None
        return f"exit status {self._process.wait(EXIT_LIMIT_S)}"


def _offered(prompt: "Prompt") -> dict[str, Any]:
    return {"prompt": prompt.text, **prompt.fields}
