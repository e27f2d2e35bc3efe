"""Functions that a recipe names by dotted path. Light imports: the reward worker starts with this."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """What a reward function takes beside the completion's text, by keyword."""

    required: list[str]
    optional: list[str]
    takes_all: bool
    """It has **kwargs."""
    first: str
    """The parameter that the completion's text goes to: no field goes there."""

    def choose(self, offered: dict[str, Any]) -> dict[str, Any]:
        """The fields that are handed to the function."""
        names = set(offered) - {self.first} if self.takes_all else set(self.required + self.optional) & set(offered)
        return {name: offered[name] for name in offered if name in names}


def load_function(path: str, option: str) -> Callable[..., Any]:
    """Import `package.module.name`.

    Args:
        path: Its dotted path; a module in the current folder is found too.
        option: The recipe's option that holds it, for the error.

    Raises:
        ValueError: no such module or name, a module that fails while it is imported, or something not callable.
    """
    module_name, _, name = path.rpartition(".")
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` has it; a console script does not
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ValueError(
            f"{option} must be the dotted path of a function, got {path!r} ({type(error).__name__}: {error})"
        ) from error
    if not callable(function):
        raise ValueError(f"{option} must be the dotted path of a function, got {path!r}, a {type(function).__name__}")
    return function


def parameters_of(function: Callable[..., Any], path: str) -> Parameters:
    """Read a reward function's signature.

    Raises:
        ValueError: it cannot be called with a text first and everything else by keyword.
    """
    try:
        first, *others = inspect.signature(function).parameters.values()
    except ValueError as error:  # it takes nothing, or is built in and does not tell
        raise ValueError(f"reward must be functions that take the completion's text, got {path}") from error
    by_keyword = [other for other in others if other.kind in (other.POSITIONAL_OR_KEYWORD, other.KEYWORD_ONLY)]
    only_by_place = [other for other in others if other.kind is other.POSITIONAL_ONLY and other.default is other.empty]
    if only_by_place or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise ValueError(f"reward must be functions of the completion's text, then fields by keyword, got {path}")
    return Parameters(
        required=[other.name for other in by_keyword if other.default is other.empty],
        optional=[other.name for other in by_keyword if other.default is not other.empty],
        takes_all=any(other.kind is other.VAR_KEYWORD for other in others),
        first=first.name if first.kind is first.POSITIONAL_OR_KEYWORD else "",
    )
