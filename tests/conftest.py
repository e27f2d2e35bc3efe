"""Markers: `gpu(n)` needs n GPUs and is left out of make test; `slow` is left to make test-all."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from colo.policy.tiny import make_tiny_model
from tests.launch import WHOLE, Launch, train


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out GPU tests that this machine has too few cards for."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = marker.args[0] if marker and marker.args else 1
        if marker and torch.cuda.device_count() < needed:
            item.add_marker(
                pytest.mark.skip(reason=f"needs {needed} GPUs, this machine has {torch.cuda.device_count()}")
            )


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder per family of tiny random models, in float32."""
    folders = {}
    for family in ("qwen3", "qwen2", "llama", "gemma3", "qwen3_moe"):
        folders[family] = tmp_path_factory.mktemp("models") / family
        make_tiny_model(family, folders[family])
    return folders


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    """A failed test's processes would slow down all that come after it."""
    yield
    while Launch.started:
        Launch.started.pop().kill()


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that nobody interrupted, on two ranks under one agent, at the default depth of sleep."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    train(run_dir, *WHOLE)
    return run_dir
