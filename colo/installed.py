"""What is installed, and which options vLLM has: found without importing it, which takes seconds."""

import ast
import difflib
import importlib.util
from pathlib import Path
from typing import Any

SOURCE = "engine/arg_utils.py"
CLASS = "EngineArgs"


def is_installed(package: str) -> bool:
    """True if a top-level package can be imported; nothing is imported to find out."""
    return _origin(package) is not None


def check_engine_options(options: dict[str, Any]) -> None:
    """Refuse a key of `engine.vllm` that vLLM does not know; where vLLM is not installed nothing is known.

    Raises:
        ValueError: such a key; it offers the nearest one that there is.
    """
    known = known_engine_options()
    for name, value in options.items():
        if known and name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1, 0.75)
            offer = f" (did you mean engine.vllm.{close[0]}?)" if close else ""
            raise ValueError(f"engine.vllm.{name} is not an option of vLLM{offer}, got {value!r}")


def known_engine_options() -> set[str]:
    """The fields of vLLM's EngineArgs, which `vllm.LLM` takes as keywords; empty where vLLM is not installed."""
    source = _origin("vllm")
    if source is None:
        return set()
    tree = ast.parse((source.parent / SOURCE).read_text())
    fields = [
        item.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == CLASS
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    assert fields, f"vLLM's {SOURCE} must have a class {CLASS} with fields"
    return {name for name in fields if not name.startswith("_")}


def _origin(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)  # of a top-level name: imports nothing
    # Without an origin it is only a folder of that name, as Weights & Biases leaves one where it runs.
    return None if spec is None or spec.origin is None else Path(spec.origin)
