"""Reward functions in their worker: what they are called with, and every way in which they fail."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from colo.config import ScoringConfig
from colo.rl.rewards import RewardError, Rewards
from colo.types import Prompt

HERE = "tests.reward_functions."
PARENT = """
import sys, time
from pathlib import Path
from colo.config import ScoringConfig
from colo.rl.rewards import Rewards
from colo.types import Prompt
rewards = Rewards({"tests.reward_functions.hangs": 1.0}, ScoringConfig(timeout_s=600))
rewards.check([], "prompts")
Path(sys.argv[1]).write_text(str(rewards._process.pid))
if sys.argv[2]:
    rewards.score([(Prompt(row=0, token_ids=[1], text="", fields={}), sys.argv[2])])
time.sleep(600)
"""

SURVIVOR = """
import signal, sys, time
from pathlib import Path
from colo.config import ScoringConfig
from colo.rl.rewards import Rewards
from colo.types import Prompt
stopping = []
signal.signal(signal.SIGTERM, lambda number, frame: stopping.append(number))
rewards = Rewards({"tests.reward_functions.sleeps": 1.0}, ScoringConfig())
rewards.check([], "prompts")
Path(sys.argv[1]).touch()
score = rewards.score([(Prompt(row=0, token_ids=[1], text="", fields={}), "2")])[0]
sys.exit(0 if stopping and score.total == 1.0 else 1)
"""


def prompt(row: int = 0, **fields: Any) -> Prompt:
    return Prompt(row=row, token_ids=[1], text="four", fields=fields)


def rewards_of(*names: str, timeout_s: float = 30.0, timeout_reward: float = 0.0) -> Rewards:
    return Rewards(
        {HERE + name: 1.0 for name in names}, ScoringConfig(timeout_s=timeout_s, timeout_reward=timeout_reward)
    )


def wait_for(claim: Any, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < deadline, "took too long"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_scores_are_weighted_sums_of_what_the_functions_return() -> None:
    weights = {HERE + "length": 0.5, HERE + "matches": -2.0, HERE + "with_default": 1.0}
    with Rewards(weights, ScoringConfig()) as rewards:
        assert rewards.names == list(weights)
        items = [(prompt(answer="abc"), "abc"), (prompt(answer="x", scale=3.0, unused=[1]), "abcd")]
        seen = []
        first, second = rewards.score(items, progress=lambda done, total: seen.append((done, total)))
        assert list(first.by_function.values()) == [3.0, 1.0, 8.0]
        assert first.total == 0.5 * 3 - 2.0 + 8.0
        assert list(second.by_function.values()) == [4.0, 0.0, 12.0]
        assert second.total == 2.0 + 12.0
        assert first.timed_out == second.timed_out == []
        assert seen == [(done, 6) for done in range(1, 7)]
        assert rewards.score([]) == []


def test_a_function_with_kwargs_gets_every_field_and_the_prompt() -> None:
    with rewards_of("count_fields", "count_others") as rewards:
        item = Prompt(row=0, token_ids=[1], text="3", fields={"b": 2, "answer": 1})
        assert list(rewards.score([(item, "completion")])[0].by_function.values()) == [123.0, 23.0]


def test_a_thousand_cheap_scores_take_a_fraction_of_a_second() -> None:
    with rewards_of("length") as rewards:
        rewards.check([], "prompts")
        started = time.perf_counter()
        scores = rewards.score([(prompt(), "x" * (index % 50)) for index in range(1000)])
        assert time.perf_counter() - started < 1.0  # 0.02 s on an idle machine
        assert [score.total for score in scores] == [index % 50 for index in range(1000)]


def test_a_list_larger_than_any_pipe_goes_through_and_comes_back_in_order() -> None:
    with rewards_of("length") as rewards:
        sizes = [(index * 7919) % 4000 for index in range(3000)]
        assert [score.total for score in rewards.score([(prompt(), "x" * size) for size in sizes])] == sizes


def test_what_a_function_draws_follows_from_the_completion_alone() -> None:
    drawn = []
    for texts in (["one", "two"], ["two", "one"]):
        with rewards_of("draws") as rewards:
            scores = rewards.score([(prompt(), text) for text in texts])
            drawn.append(dict(zip(texts, [score.total for score in scores], strict=True)))
    assert drawn[0] == drawn[1]
    assert drawn[0]["one"] != drawn[0]["two"]


def test_a_time_out_is_recorded_and_the_rest_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    weights = {HERE + "sleeps": 2.0, HERE + "length": 1.0}
    with Rewards(weights, ScoringConfig(timeout_s=0.5, timeout_reward=-1.0)) as rewards:
        scores = rewards.score([(prompt(), text) for text in ("0.0", "600", "0.10", "600.0")])
    assert [score.timed_out for score in scores] == [[], [HERE + "sleeps"], [], [HERE + "sleeps"]]
    assert [score.total for score in scores] == [2 + 3, -2 + 3, 2 + 4, -2 + 5]
    assert scores[1].by_function == {HERE + "sleeps": -1.0, HERE + "length": 3.0}
    assert "sleeps took longer than scoring.timeout_s 0.5" in caplog.text


def test_the_limit_is_for_one_call_and_not_for_their_sum() -> None:
    with rewards_of("sleeps", timeout_s=0.5) as rewards:
        assert [score.timed_out for score in rewards.score([(prompt(), "0.15")] * 6)] == [[]] * 6


@pytest.mark.parametrize("how", ["regex", "c"])
def test_a_call_stuck_in_c_is_ended(how: str) -> None:
    with rewards_of("hangs", timeout_s=0.5) as rewards:
        started = time.monotonic()
        scores = rewards.score([(prompt(), "fine"), (prompt(), how), (prompt(), "fine")])
        assert [bool(score.timed_out) for score in scores] == [False, True, False]
        assert time.monotonic() - started < 20


def test_what_a_timed_out_function_started_ends_with_it(tmp_path: Path) -> None:
    with rewards_of("hangs", timeout_s=2.0) as rewards:
        assert rewards.score([(prompt(), f"child:{tmp_path / 'pid'}")])[0].timed_out
    wait_for(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_a_function_that_raises_is_reported_with_line_completion_and_traceback() -> None:
    with rewards_of("length", "raises") as rewards:
        with pytest.raises(RewardError) as caught:
            rewards.score([(prompt(), "good"), (prompt(row=41), "bad")])
        first, second, *trace = str(caught.value).split("\n")
        assert first == f"reward function {HERE}raises raised KeyError on prompt line 42"
        assert second == "completion: 'bad'"
        assert 'raise KeyError("a reason of its own")' in "".join(trace)
        assert "reward_worker.py" not in "".join(trace)
        assert [score.total for score in rewards.score([(prompt(), "good")])] == [5.0]  # no answer of the old list


@pytest.mark.parametrize(
    ("function", "completion", "says", "details"),
    [
        ("exits", "today", "raised SystemExit", "SystemExit: not today"),
        ("dies", "x", "ended its process", "exit status 7"),
        ("returns", "none", "returned no finite number", "value: None"),
        ("returns", "text", "returned no finite number", "value: '1.0'"),
        ("returns", "nan", "returned no finite number", "value: nan"),
        ("returns", "inf", "returned no finite number", "value: inf"),
    ],
)
def test_an_exit_and_a_result_that_is_no_finite_number_are_errors(
    function: str, completion: str, says: str, details: str
) -> None:
    with rewards_of(function) as rewards, pytest.raises(RewardError) as caught:
        rewards.score([(prompt(row=6), completion)])
    message = str(caught.value)
    assert message.startswith(f"reward function {HERE}{function} {says} on prompt line 7\ncompletion: {completion!r}\n")
    assert details in message


def test_a_field_that_a_function_needs_and_a_line_lacks_is_refused_at_start() -> None:
    prompts = [prompt(answer="1"), prompt(row=2, level=3, source="b")]
    with rewards_of("length", "matches", "with_default") as rewards:
        rewards.check(prompts[:1], "prompts")
        with pytest.raises(ValueError, match=r"^eval_prompts must have") as caught:
            rewards.check(prompts, "eval_prompts")
    assert str(caught.value) == (
        f"eval_prompts must have the fields that reward function {HERE}matches needs: answer, "
        "got level, source on line 3"
    )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (HERE + "missing", f"reward must be the dotted path of a function, got '{HERE}missing' (AttributeError"),
        (
            "no_such_module.f",
            "reward must be the dotted path of a function, got 'no_such_module.f' (ModuleNotFoundError",
        ),
        (HERE + "NOT_A_FUNCTION", f"reward must be the dotted path of a function, got '{HERE}NOT_A_FUNCTION', a int"),
        (HERE + "takes_nothing", f"reward must be functions that take the completion's text, got {HERE}takes_nothing"),
        (
            HERE + "only_keywords",
            f"reward must be functions of the completion's text, then fields by keyword, got {HERE}on",
        ),
    ],
)
def test_a_path_that_is_no_reward_function_is_refused_at_start(path: str, message: str) -> None:
    with (
        Rewards({path: 1.0}, ScoringConfig()) as rewards,
        pytest.raises(ValueError, match=r"^reward must be") as caught,
    ):
        rewards.check([], "prompts")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os\nos._exit(3)\n", "reward must be functions whose modules import, got exit status 3 of the process"),
        (
            "1 / 0\n",
            "reward must be the dotted path of a function, got 'broken.f' (ZeroDivisionError: division by zero)",
        ),
    ],
)
def test_a_module_that_fails_while_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.chdir(tmp_path)  # and so a module in the current folder is found
    with Rewards({"broken.f": 1.0}, ScoringConfig()) as rewards, pytest.raises(ValueError, match=r"^reward") as caught:
        rewards.check([], "prompts")
    assert str(caught.value).startswith(message)


def test_what_a_function_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with rewards_of("prints") as rewards:
        assert rewards.score([(prompt(), "hello")])[0].total == 0.5
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "hello")


def test_the_worker_loads_no_torch() -> None:
    code = "import sys, colo.rl.reward_worker, colo.rl.tasks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_worker_that_ended_between_calls_is_an_error_and_the_next_call_works() -> None:
    with rewards_of("length") as rewards:
        rewards.check([], "prompts")
        assert rewards._process is not None
        rewards._process.kill()
        rewards._process.wait()
        with pytest.raises(RewardError, match="ended between calls: exit status -9"):
            rewards.score([(prompt(), "abc")])
        assert rewards.score([(prompt(), "abc")])[0].total == 3.0


@pytest.mark.parametrize("doing", ["", "c"])
def test_no_worker_outlives_its_parent(tmp_path: Path, doing: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "pid"), doing])
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    worker = int((tmp_path / "pid").read_text())
    time.sleep(0.3)  # into the call
    assert is_running(worker)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not is_running(worker))


def test_a_sigterm_to_the_ranks_process_group_does_not_end_the_worker(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", SURVIVOR, str(tmp_path / "pid")], start_new_session=True)
    wait_for(lambda: (tmp_path / "pid").exists())
    os.killpg(parent.pid, signal.SIGTERM)  # as torchrun does
    assert parent.wait(30) == 0
