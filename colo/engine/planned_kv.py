"""The KV cache's size where the recipe names none: what the memory plan says, for this card and these ranks."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colo.config import Config
from colo.engine.depth import capacity_bytes
from colo.memory_plan import CONTEXT_BYTES, GIB, make_plan
from colo.model_shape import model_shape, read_draft
from colo.ranks import Ranks
from colo.rl.prompts import load_rows

logger = logging.getLogger(__name__)
DEFAULT_GPU_SHARE = 0.45
"""Of the card, for weights and KV cache, where engine.vllm.num_gpu_blocks_override alone is given."""
NO_GPU_SHARE = 0.01
"""What vLLM is told where bytes say how large the KV cache is: it uses the share in a check alone then, that so much is
free at the start (vllm/v1/worker/utils.py, `request_memory`)."""


def kv_arguments(
    config: Config, ranks: Ranks, model_folder: Path, stand_ins: Iterable[tuple[str, Tensor]], *, beside_policy: bool
) -> dict[str, Any]:
    """What tells vLLM how much memory to take, unless `engine.vllm` says it. Collective.

    Args:
        config: The run's.
        ranks: All of them get the same size: that of the smallest card, or on CPU of the least memory.
        model_folder: Its config.json is read.
        stand_ins: Names and whole shapes of the model's tensors.
        beside_policy: Whether a policy and its optimizer will be on the card too.
    """
    options, on_cpu = config.engine.vllm, ranks.device.type == "cpu"
    if not on_cpu and "gpu_memory_utilization" in options:
        return {}
    if not on_cpu and options.get("num_gpu_blocks_override") is not None:
        return {"gpu_memory_utilization": DEFAULT_GPU_SHARE}
    share = {} if on_cpu else {"gpu_memory_utilization": NO_GPU_SHARE}
    if options.get("kv_cache_memory_bytes") is not None:
        return share
    shape = model_shape(
        ((name, tuple(tensor.shape)) for name, tensor in stand_ins),
        json.loads((model_folder / "config.json").read_text()),
    )
    draft = Path(config.engine.speculative.get("model") or "")
    kv = make_plan(
        config,
        shape,
        num_ranks=ranks.world_size,
        card_bytes=min(ranks.gather(_usable_bytes(ranks), "planning the KV cache")),
        is_cpu=on_cpu,
        is_training=beside_policy,
        num_eval_prompts=num_eval_prompts(config, is_training=beside_policy),
        draft=read_draft(draft) if (draft / "config.json").is_file() else None,
    ).kv
    logger.info(  # shown by rank 0 alone
        "KV cache of %.2f GiB on each rank, by the plan: %d sequences of %d tokens; all %d that run at once need %.2f, "
        "there is room for %.2f (engine.vllm.kv_cache_memory_bytes sets it)",
        *(kv.bytes / GIB, kv.num_sequences, kv.sequence_tokens, kv.num_running, kv.needed / GIB, kv.room / GIB),
    )
    return share | {"kv_cache_memory_bytes": kv.bytes}


def num_eval_prompts(config: Config, *, is_training: bool) -> int:
    """Held-out prompts, which an evaluation submits all at once; 0 where there is none."""
    is_evaluated = config.eval_prompts and (config.eval_every or not is_training)
    return len(load_rows(config.eval_prompts, "eval_prompts")) if is_evaluated else 0


def _usable_bytes(ranks: Ranks) -> int:
    """The card's memory, less what others hold of it now; on CPU this rank's share of the host's."""
    if ranks.device.type == "cpu":
        return capacity_bytes(ranks.device)
    free, total = torch.cuda.mem_get_info()
    return min(total, free + CONTEXT_BYTES)
