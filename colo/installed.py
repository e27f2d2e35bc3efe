"""What is installed, and which options vLLM has: found without importing it, which takes seconds."""

import ast
import difflib
import importlib.util
from pathlib import Path
from typing import Any

ENGINE_ARGS = ("engine/arg_utils.py", "EngineArgs")
"""What `vllm.LLM` takes as keywords: a source file of vLLM, and a class in it."""
SPECULATIVE_CONFIG = ("config/speculative.py", "SpeculativeConfig")
"""What vLLM's speculative_config takes as keys."""


def is_installed(package: str) -> bool:
    """True if a top-level package can be imported; nothing is imported to find out."""
    return _origin(package) is not None


def check_vllm_options(section: str, options: dict[str, Any], where: tuple[str, str]) -> None:
    """Refuse a key of a section that is no field of vLLM's class; where vLLM is not installed nothing is known.

    Raises:
        ValueError: such a key; it offers the nearest one that there is.
    """
    known = known_options(where)
    for name, value in options.items():
        if known and name not in known:
            close = difflib.get_close_matches(name, sorted(known), 1, 0.75)
            offer = f" (did you mean {section}.{close[0]}?)" if close else ""
            raise ValueError(f"{section}.{name} is not an option of vLLM{offer}, got {value!r}")


def known_options(where: tuple[str, str]) -> set[str]:
    """The fields of a class in a source file of vLLM; empty where vLLM is not installed."""
    source, name = where
    tree = _vllm_source(source)
    if tree is None:
        return set()
    fields = [
        item.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == name
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    assert fields, f"vLLM's {source} must have a class {name} with fields"
    return {field for field in fields if not field.startswith("_")}


def known_choices(source: str, name: str) -> set[str]:
    """The strings of a `Literal` in a source file of vLLM, those of Literals within it too; empty without vLLM."""
    tree = _vllm_source(source)
    if tree is None:
        return set()
    values = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert name in values, f"vLLM's {source} must define {name}"
    choices, open_names = set(), [name]
    while open_names:
        for node in ast.walk(values[open_names.pop()]):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                choices.add(node.value)
            elif isinstance(node, ast.Name) and node.id in values:
                open_names.append(node.id)
    return choices


def _vllm_source(path: str) -> ast.Module | None:
    origin = _origin("vllm")
    return None if origin is None else ast.parse((origin.parent / path).read_text())


def _origin(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)  # of a top-level name: imports nothing
    # Without an origin it is only a folder of that name, as Weights & Biases leaves one where it runs.
    return None if spec is None or spec.origin is None else Path(spec.origin)
