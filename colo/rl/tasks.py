"""Built-in tasks that need no download: rows of prompts, and their rewards. Deterministic."""

import random
import re
from typing import Any

NUM_HELDOUT = 256
HELDOUT_SEED = 0
MAX_DIGITS = 9
"""A longer run of digits is no answer here; and int() refuses above 4300."""


def arithmetic() -> list[dict[str, Any]]:
    """Every two-digit addition and subtraction that `arithmetic_heldout` does not have, as chat messages.

    Example: {"messages": [{"role": "user", "content": "What is 3 + 5? Answer with the number only."}], "answer": "8"},
    with numbers from 10 to 99.
    """
    return [_arithmetic_row(problem) for problem in sorted(_shuffled_problems()[NUM_HELDOUT:])]


def arithmetic_heldout() -> list[dict[str, Any]]:
    """256 problems, drawn at random once and for all, that `arithmetic` leaves out."""
    return [_arithmetic_row(problem) for problem in _shuffled_problems()[:NUM_HELDOUT]]


def arithmetic_reward(completion: str, answer: str | int) -> float:
    """1.0 if the last integer in the text is the answer, else 0.0. A minus sign after a digit is an operator."""
    return float(_last_integer(completion) == str(answer))


def arithmetic_digits_reward(completion: str, answer: str | int) -> float:
    """The share of the answer's characters that the last integer in the text has in their places, from the right.

    In [0, 1], 1.0 only for the answer itself: it says which of several wrong answers is nearer, where
    `arithmetic_reward` says 0.0 of all. Example: 71 for 81 is 0.5, 181 for 81 is 0.667, 18 for -18 is 0.667.
    """
    given, right = _last_integer(completion)[::-1], str(answer)[::-1]
    matches = sum(a == b for a, b in zip(given, right, strict=False))
    return matches / max(len(given), len(right))


def _last_integer(text: str) -> str:
    """As Python writes it; empty where there is none, or one that is no answer here."""
    integers = re.findall(r"(?<![0-9])-?[0-9]+", text)
    return str(int(integers[-1])) if integers and len(integers[-1]) <= MAX_DIGITS else ""


def letters() -> list[dict[str, Any]]:
    """36 prompts of a few bytes for a tiny model, to be answered with lowercase letters."""
    words = ("apple", "bear", "cloud", "desk", "eagle", "fern", "grape", "house", "iron", "jewel", "kite", "lemon")
    return [{"prompt": f"{verb} {word}: "} for word in words for verb in ("name", "spell", "sing")]


def letters_reward(completion: str) -> float:
    """The share of the text's characters that are lowercase ASCII letters, in [0, 1]; 0.0 for an empty text."""
    return sum("a" <= character <= "z" for character in completion) / max(1, len(completion))


def _shuffled_problems() -> list[tuple[int, str, int]]:
    problems = [(a, sign, b) for a in range(10, 100) for sign in "+-" for b in range(10, 100)]
    random.Random(HELDOUT_SEED).shuffle(problems)
    return problems


def _arithmetic_row(problem: tuple[int, str, int]) -> dict[str, Any]:
    a, sign, b = problem
    question = f"What is {a} {sign} {b}? Answer with the number only."
    return {"messages": [{"role": "user", "content": question}], "answer": str(a + b if sign == "+" else a - b)}
