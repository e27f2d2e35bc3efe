"""The process in which reward functions run; `colo.rl.rewards` starts it and speaks with it.

It reads dotted paths and answers with each function's `Parameters`, or with a refusal. Then it reads lists of (path,
text, fields), says `started`, and answers each entry as soon as it has it: ("value", number), or (what went wrong,
details). It ends with its parent: with the connection, and on Linux in the middle of a call too.
"""

import ctypes
import math
import os
import random
import signal
import sys
import traceback
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

from colo.rl.functions import load_function, parameters_of

PR_SET_PDEATHSIG = 1


def serve(descriptor: int, parent: int) -> None:
    """Serve a connection until the parent closes it.

    Args:
        descriptor: Of the connection's socket, inherited.
        parent: Its process id.
    """
    _end_with(parent)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        functions = {path: load_function(path, "reward") for path in connection.recv()}
        connection.send({path: parameters_of(function, path) for path, function in functions.items()})
    except ValueError as refusal:
        connection.send(str(refusal))
        return
    while True:
        try:
            calls = connection.recv()
        except EOFError:
            return
        connection.send("started")
        for path, text, fields in calls:
            _seed_generators(f"{path} {text}")
            connection.send(_call(functions[path], text, fields))


def _seed_generators(text: str) -> None:
    """Make what a function draws a matter of the completion alone: a run that is resumed scores it alike."""
    random.seed(text)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(zlib.crc32(text.encode()))


def _call(function: Callable[..., Any], text: str, fields: dict[str, Any]) -> tuple[str, float | str]:
    try:
        value = function(text, **fields)
        number = float(value) if isinstance(value, SupportsFloat) else math.nan
    except BaseException as error:  # noqa: BLE001 - SystemExit too: the parent raises it, with the completion
        own = error.__traceback__.tb_next if error.__traceback__ else None
        trace = "".join(traceback.format_exception(type(error), error, own))
        return f"raised {type(error).__name__}", trace
    if not math.isfinite(number):
        return "returned no finite number", f"value: {value!r}"
    return "value", number


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        sys.exit("the process that wants rewards has ended")
