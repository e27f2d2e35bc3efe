"""How the commands that take no recipe read their words: all refusals are a ValueError and read alike."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

Commands = dict[str, tuple[Callable[[list[str]], None], str]]
"""By name: what runs it on the words after its name, and what it does."""


class Parser(argparse.ArgumentParser):
    """One that raises what it refuses, under the command's name; options are not abbreviated."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise it."""
        raise ValueError(f"{self.prog.removeprefix('colo ')}: {message}")


def whole_number(option: str, text: str) -> int:
    """The number that `text` is.

    Raises:
        ValueError: it is none, or below 1; the message names the option.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{option} must be a whole number of at least 1, got {text!r}")
    return int(text)


def run_named(kind: str, word: str, commands: Commands, arguments: list[str]) -> None:
    """Run the one of several that the first word names; list them where there is none.

    Args:
        kind: Of what they are, such as "benchmark".
        word: The command that they are part of, such as "bench".
        commands: All of them.
        arguments: The words after `word`.

    Raises:
        ValueError: no such one, or an option of it is wrong.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        width = max(map(len, commands)) + 2
        listed = "\n".join(f"  {known:<{width}}{text}" for known, (_, text) in commands.items())
        sys.stdout.write(f"usage: colo {word} {kind.upper()} [options]\n\n{kind}s:\n{listed}\n")
        return
    if name not in commands:
        raise ValueError(f"the {kind} must be one of {', '.join(commands)}, got {name!r}")
    commands[name][0](rest)
