"""The reload: the policy's weights into the engine, in place."""

from collections.abc import Iterator

import torch
from torch import Tensor

from colo.engine.build import VllmParts
from colo.engine.cpu import repack_experts
from colo.types import NamedTensors

MAX_NAMED = 5


def load_weights(parts: VllmParts, weights: NamedTensors) -> int:
    """One call of the model's own `load_weights` over `weights`; return the bytes handed over. Collective.

    vLLM knows there how a checkpoint's tensors are fused, sliced over a tensor-parallel group and tied.

    Raises:
        RuntimeError: an engine parameter was left unwritten.
    """
    num_bytes = 0

    def in_engine_dtype() -> Iterator[tuple[str, Tensor]]:
        nonlocal num_bytes
        for name, tensor in weights:
            tensor = tensor.detach()
            # Cast here what is large: vLLM warns once a tensor when it has to. A vector may be a buffer that vLLM keeps
            # in float32 (a router's bias), so its own copy casts it, or not.
            if tensor.is_floating_point() and tensor.ndim > 1:
                tensor = tensor.to(parts.dtype)
            num_bytes += tensor.nbytes
            yield name, tensor

    model = parts.model
    with torch.no_grad():
        written = model.load_weights(in_engine_dtype())  # type: ignore[operator]
    missing = sorted({name for name, _ in model.named_parameters()} - set(written))
    if missing:
        shown = ", ".join(missing[:MAX_NAMED]) + (", ..." if len(missing) > MAX_NAMED else "")
        raise RuntimeError(f"the reload left {len(missing)} of the engine's parameters unwritten: {shown}")
    repack_experts(parts.packed_experts)
    return num_bytes
