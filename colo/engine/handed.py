"""What a caller hands over as the policy's tensors, if it is what the engine was built for."""

import torch

from colo.engine.proof import shorten
from colo.ranks import Ranks
from colo.types import NamedTensors, TensorShard


def take(
    weights: NamedTensors, sources: dict[str, tuple[tuple[int, ...], torch.dtype]], ranks: Ranks, *, is_chunk: bool
) -> dict[str, TensorShard]:
    """The shards by name; a whole tensor is one that holds everything. Collective.

    Args:
        weights: Whole tensors or shards.
        sources: The whole shape and the dtype that each must have.
        ranks: Of the launch.
        is_chunk: Whether some may be left out.

    Raises:
        ValueError: on every rank: a name, a shape or a dtype that was not expected, or a name that is missing.
    """
    handed: dict[str, TensorShard] = {}

    def check() -> None:
        twice = []
        for name, value in weights:
            if name in handed:
                twice.append(f"{name} twice")
            is_shard = isinstance(value, TensorShard)
            shard = value if is_shard else TensorShard(shape=tuple(value.shape), start=0, local=value.detach())
            handed[name] = shard
        wrong = twice + [f"{name}, which is none of them" for name in handed if name not in sources]
        wrong += [f"no {name}" for name in sources if name not in handed and not is_chunk]
        for name, shard in handed.items():
            wanted, got = sources.get(name), (shard.shape, shard.local.dtype)
            if wanted and wanted != got:
                wrong.append(f"{name} {_kind(*got)} instead of {_kind(*wanted)}")
        if wrong:
            raise ValueError(f"weights must be the tensors that the engine was built for, got {shorten(wrong)}")

    ranks.agreed(check, "taking the policy's tensors")
    return handed


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
