"""The KV cache's size where the recipe names none: what the memory plan says, for this card and these ranks."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from colo.config import Config
from colo.engine.depth import capacity_bytes
from colo.memory_plan import CONTEXT_BYTES, GIB, make_plan
from colo.model_shape import ModelShape, UnknownSizeError, draft_shape, model_shape
from colo.ranks import Ranks
from colo.rl.prompts import load_rows

logger = logging.getLogger(__name__)
DEFAULT_GPU_SHARE = 0.45
"""Of the card, for weights and KV cache, where engine.vllm.num_gpu_blocks_override alone is given."""
NO_GPU_SHARE = 0.01
"""What vLLM is told where bytes say how large the KV cache is: it uses the share in a check alone then, that so much is
free at the start (vllm/v1/worker/utils.py, `request_memory`)."""
SIZES = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("num_hidden_layers", "intermediate_size", "vocab_size"),
)
"""The usual names, under which transformers knows a size whatever config.json calls it (n_heads, d_model)."""


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
    share = {} if on_cpu else {"gpu_memory_utilization": NO_GPU_SHARE}
    if not is_planned(options, on_cpu=on_cpu):
        if not on_cpu and "gpu_memory_utilization" in options:
            return {}
        by_blocks = not on_cpu and options.get("num_gpu_blocks_override") is not None
        return {"gpu_memory_utilization": DEFAULT_GPU_SHARE} if by_blocks else share
    shape = model_shape(((name, tuple(tensor.shape)) for name, tensor in stand_ins), read_sizes(model_folder))
    kv = make_plan(
        config,
        shape,
        num_ranks=ranks.world_size,
        card_bytes=min(ranks.gather(_usable_bytes(ranks), "planning the KV cache")),
        is_cpu=on_cpu,
        is_training=beside_policy,
        num_eval_prompts=num_eval_prompts(config, is_training=beside_policy),
        draft=draft_shape(config.engine.speculative),
    ).kv
    logger.info(  # shown by rank 0 alone
        "KV cache of %.2f GiB on each rank, by the plan: %d sequences of %d tokens; all %d that run at once need %.2f, "
        "there is room for %.2f (engine.vllm.kv_cache_memory_bytes sets it)",
        *(kv.bytes / GIB, kv.num_sequences, kv.sequence_tokens, kv.num_running, kv.needed / GIB, kv.room / GIB),
    )
    return share | {"kv_cache_memory_bytes": kv.bytes}


def is_planned(options: Mapping[str, Any], *, on_cpu: bool) -> bool:
    """Whether the KV cache's size is the plan's: `options`, engine.vllm, do not say it for this device."""
    saying = ("kv_cache_memory_bytes",) if on_cpu else ("kv_cache_memory_bytes", "num_gpu_blocks_override")
    has_share = not on_cpu and "gpu_memory_utilization" in options
    return not has_share and all(options.get(name) is None for name in saying)


def plannable_shape(config: Config, read: Callable[[], ModelShape], *, on_cpu: bool) -> ModelShape | None:
    """The model's shape, as `read` gives it; None where a size is unknown and the recipe gives the KV cache's.

    Raises:
        ValueError: the plan is to say how large the cache is, and the model or the draft lacks a size.
    """
    try:
        draft_shape(config.engine.speculative)
        return read()
    except UnknownSizeError as error:
        if is_planned(config.engine.vllm, on_cpu=on_cpu):
            raise ValueError(str(error)) from error
        logger.info("the memory is not planned: %s", error)
        return None


def read_sizes(folder: Path) -> dict[str, Any]:
    """A folder's config.json as transformers completes it, with its sizes under the usual names."""
    text = AutoConfig.from_pretrained(folder).get_text_config()
    usual = {name: getattr(text, name, None) for name in SIZES}
    return text.to_dict() | {name: size for name, size in usual.items() if size is not None}


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
