"""The arrows go one way, and files and functions stay small."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "colo"
ROWS = (
    ("installed",),
    ("config", "types", "ranks", "rng"),
    ("model_shape",),
    ("recipe", "tensor_files", "kv_size", "update_peak"),
    ("resume", "memory_plan"),
    ("rl", "memory_advice"),
    ("policy", "engine"),
    ("start", "stop"),
    ("checkpoint", "metrics", "evaluate"),
    ("train",),
    ("commands",),
    ("cli",),
)
"""A room imports rooms of rows above its own; rooms of one row are strangers."""
LEVEL = {room: number for number, row in enumerate(ROWS) for room in row}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 300, 80
MAY_BE_LONGER = {"config.py"}  # it documents every knob


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively, which hides the arrow"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _imports(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in _imported(path))


def _id(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_module_has_a_row() -> None:
    assert {_room(path) for path in MODULES} <= set(LEVEL)


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_a_module_imports_only_from_rows_above_its_own(path: Path) -> None:
    room = _room(path)
    for name in sorted(_imported(path)):
        package, _, rest = name.partition(".")
        imported = rest.split(".")[0]
        if package == "colo" and imported not in (room, "__version__"):
            assert LEVEL[imported] < LEVEL[room], f"colo.{room} must not import colo.{imported}"


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_vllm_and_the_process_group_stay_in_their_rooms(path: Path) -> None:
    assert _room(path) == "engine" or not _imports(path, "vllm"), "only colo/engine imports vllm"
    assert _room(path) != "rl" or not _imports(path, "torch.distributed"), (
        "rl speaks with other ranks through colo.ranks"
    )


@pytest.mark.parametrize("path", MODULES, ids=_id)
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    num_lines = len(text.splitlines())
    assert num_lines <= MAX_FILE_LINES or path.name in MAY_BE_LONGER, f"{num_lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"
