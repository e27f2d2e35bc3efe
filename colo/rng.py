"""The random states of this process, as JSON holds them: a checkpoint keeps each rank's."""

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int, rank: int) -> None:
    """Start every generator of this process from (seed, rank): what draws from them repeats from run to run."""
    python, numpy, torch_seed = np.random.SeedSequence([seed, rank]).generate_state(3)
    random.seed(int(python))
    np.random.seed(int(numpy))
    torch.manual_seed(int(torch_seed))  # the device's too


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of Python, NumPy, torch and, on a GPU, the device's generator."""
    version, words, gauss = random.getstate()
    name, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(key).tolist(), position, has_gauss, cached],
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else "",
    }


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Go on from what `rng_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_text(state["torch"]))
    if state["cuda"] and device.type == "cuda":
        torch.cuda.set_rng_state(_from_text(state["cuda"]), device)


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
