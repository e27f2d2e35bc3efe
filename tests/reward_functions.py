"""Reward functions for test_rewards.py: good ones, and every way to go wrong."""

import ctypes
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def length(completion: str) -> int:
    return len(completion)


def matches(completion: str, answer: str) -> bool:
    return completion == answer


def with_default(completion: str, *, scale: float = 2.0, prompt: str = "") -> np.float32:
    return np.float32(scale * len(prompt))


def count_fields(answer: str, /, **fields: Any) -> float:
    """Its first parameter is called as a field is, and still gets the completion."""
    assert answer == "completion"
    return float("".join(str(fields[name]) for name in sorted(fields)))


def count_others(answer: str, **fields: Any) -> float:
    """Called by keyword, `answer` would be given twice: the field is not handed over."""
    return count_fields(answer, **fields)


def raises(completion: str) -> float:
    if completion == "bad":
        raise KeyError("a reason of its own")
    return 1.0


def exits(completion: str) -> float:
    sys.exit(f"not {completion}")


def dies(completion: str) -> float:
    os._exit(7)


def returns(completion: str) -> Any:
    return {"none": None, "text": "1.0", "nan": float("nan"), "inf": np.inf}[completion]


def prints(completion: str) -> float:
    sys.stdout.write(completion)
    sys.stdout.flush()
    return 0.5


def sleeps(completion: str) -> float:
    time.sleep(float(completion))
    return 1.0


def hangs(completion: str) -> float:
    """Ways to never return; in the first two Python runs no line, so it sees no signal and no exception."""
    if completion == "regex":
        re.match(r"(a+)+b", "a" * 64)
    elif completion == "c":
        ctypes.PyDLL(None).pause()  # holds the interpreter's lock
    elif completion.startswith("child:"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(completion.removeprefix("child:")).write_text(str(child.pid))
        child.wait()
    return 1.0


def takes_nothing() -> float:
    return 0.0


def only_keywords(*, completion: str) -> float:
    return 0.0


NOT_A_FUNCTION = 3


def raises_on_rank_1(completion: str) -> float:
    if os.environ["RANK"] == "1":
        raise ValueError("this reward is broken on rank 1")
    return 0.0


def one_prompt_of_four_is_slow() -> list[dict[str, Any]]:
    """Prompts for `slow_where_told`: as many as a fast step takes."""
    return [{"prompt": f"prompt {number}: ", "is_slow": number == 0} for number in range(4)]


def slow_where_told(completion: str, is_slow: bool) -> float:
    if is_slow:
        time.sleep(600)
    return 1.0


def draws(completion: str) -> float:
    return random.random() + float(np.random.rand()) + hash(completion) / 2**64


def rows_of_this_rank() -> list[dict[str, Any]]:
    return [{"prompt": f"on rank {os.environ['RANK']}"}]


def no_rows() -> list[dict[str, Any]]:
    raise ValueError("no rows today")
