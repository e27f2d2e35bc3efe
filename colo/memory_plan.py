"""The memory that a recipe will take on each rank, by arithmetic: no GPU, no vLLM and no tensor is needed.

A rank's card holds two phases in turn. `generate`: the engine awake beside what the policy keeps. `update`: the policy
at its peak beside what a sleep leaves. Every coefficient has a name here, in `update_peak` or in `kv_size`, so that it
can be put right against what a run measures (`memory_gib/...`).
"""

import math
from dataclasses import dataclass, field

from colo.config import Config
from colo.kv_size import KvPlan, plan_kv
from colo.model_shape import DTYPE_BYTES, FLOAT32, DraftShape, ModelShape
from colo.update_peak import update_peak

GIB = 1 << 30
MIB = 1 << 20
CONTEXT_BYTES = 820 * MIB
"""CUDA's context and the kernels that are loaded: 0.80 GiB on an H200 with torch 2.11."""
COMMUNICATION_BYTES = 512 * MIB
"""NCCL's buffers and vLLM's custom all-reduce, with more than one rank."""
GRAPH_BYTES = 768 * MIB
"""CUDA graphs, unless engine.vllm.enforce_eager."""
ENGINE_BUFFER_BYTES = 100 * MIB
"""What vLLM's runner holds outside of its sleeping pools: inputs, block tables, workspaces."""
SAMPLER_STATE_BYTES = (4.25, 50 * MIB)
"""What vLLM's GPU runner keeps with the weights for sampling: for each of max_num_seqs and token of the vocabulary (a
count of 32 bits and a few masks), and beside."""
CACHE_SHARE = 0.1
"""Of the activations: what torch's allocator has reserved beyond them at the peak; more where lengths vary much."""
SMALL_CARD_BYTES = 70 * GIB
"""Below it vLLM takes other defaults (EngineArgs.get_batch_defaults of vllm/engine/arg_utils.py)."""
LARGE_CARD_DEFAULTS = (1024, 16384)
"""max_num_seqs and max_num_batched_tokens; an A100, whatever its memory, has those of a small card."""
SMALL_CARD_DEFAULTS = (256, 8192)
CPU_DEFAULTS = (256, 4096)
SAMPLED_LOGIT_COPIES = 3
"""[max_num_seqs, vocabulary] tensors in float32 while vLLM samples, beside one in compute_dtype."""
LABELS = {
    "engine_weights": "engine weights",
    "kv_cache": "KV cache",
    "cuda_graphs": "CUDA graphs",
    "engine_buffers": "engine buffers",
    "policy_parameters": "policy parameters",
    "reference_model": "reference model",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations at peak",
    "torch_cache": "torch's cache",
    "context": "context",
    "communication": "communication",
}
"""The plan's rows."""
DEPTHS = ("2", "kv", "none")
"""Depth 1 holds as much of the card as 2."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank holds, in bytes; the ranks are alike."""

    card_bytes: int
    margin_bytes: int
    """engine.sleep_margin_gib."""
    depth: str
    """At which the recipe lets the engine sleep, of DEPTHS: 1 holds as much as 2, and auto begins with 2."""
    kv: KvPlan
    generate: dict[str, int]
    """By part, with the KV cache."""
    update: dict[str, int]
    """By part, at the peak, with an engine that sleeps at depth 2."""
    wake_bytes: int
    """All parts while the engine's weights are reloaded, before the KV cache is mapped."""
    host: dict[str, int] = field(default_factory=dict)
    """Host memory of one rank, by what it is for."""

    @property
    def generate_bytes(self) -> int:
        """All parts while the engine generates, or before, whichever is more."""
        return max(sum(self.generate.values()), self.wake_bytes)

    @property
    def generates(self) -> bool:
        """Whether the engine fits beside what the policy keeps, with the margin, and vLLM starts with its KV cache."""
        return self.kv.bytes >= self.kv.least and self.generate_bytes + self.margin_bytes <= self.card_bytes

    def update_bytes(self, depth: str) -> int:
        """All parts at the peak of an update, with an engine that sleeps at `depth`."""
        weights = self.generate["engine_weights"] if depth in ("none", "kv") else 0
        return sum(self.update.values()) + weights + (self.kv.bytes if depth == "none" else 0)

    def fits(self, depth: str) -> bool:
        """Whether the update fits beside it, with the margin."""
        return self.update_bytes(depth) + self.margin_bytes <= self.card_bytes

    @property
    def is_possible(self) -> bool:
        """Whether both phases fit at the recipe's depth of sleep."""
        return self.generates and self.fits(self.depth)

    @property
    def peak_bytes(self) -> int:
        """What a rank holds of its card at the most, at the recipe's depth of sleep."""
        return max(self.generate_bytes, self.update_bytes(self.depth))

    @property
    def auto_depth(self) -> str:
        """What engine.sleep=auto will come to after the first updates."""
        return next((depth for depth in reversed(DEPTHS) if self.fits(depth)), DEPTHS[0])


def make_plan(
    config: Config,
    shape: ModelShape,
    *,
    num_ranks: int,
    card_bytes: int,
    is_cpu: bool = False,
    is_training: bool = True,
    num_eval_prompts: int = 0,
    draft: DraftShape | None = None,
) -> Plan:
    """Plan a recipe.

    Args:
        config: The run's.
        shape: Of the model.
        num_ranks: Of all hosts.
        card_bytes: Memory of each card, as the driver says it.
        is_cpu: vLLM's defaults on CPU; the parts that only a card has are left in.
        is_training: False where no policy is there, as in an evaluation.
        num_eval_prompts: Held-out prompts, which are all submitted at once.
        draft: Of engine.speculative.
    """
    draft = draft or DraftShape()
    options, size = config.engine.vllm, config.engine.tensor_parallel_size
    compute = DTYPE_BYTES[config.policy.compute_dtype]
    offload = config.policy.offload if is_training else "none"
    resident = {
        "cuda_graphs": 0 if options.get("enforce_eager") else GRAPH_BYTES,
        "engine_buffers": ENGINE_BUFFER_BYTES,
        "context": CONTEXT_BYTES,
        "communication": COMMUNICATION_BYTES if num_ranks > 1 else 0,
    }
    held = _held(config, shape, num_ranks, is_training=is_training)
    kept = {part: 0 if _is_aside(part, offload) else number for part, number in held.items()}
    at_wake = held | {"optimizer": kept["optimizer"]}  # the parameters stay until the engine is reloaded
    weights = compute * shape.engine_parameters(size) + math.ceil(draft.weight_bytes / size)
    defaults = (
        CPU_DEFAULTS if is_cpu else LARGE_CARD_DEFAULTS if card_bytes >= SMALL_CARD_BYTES else SMALL_CARD_DEFAULTS
    )
    num_seqs, num_batched = options.get("max_num_seqs", defaults[0]), options.get("max_num_batched_tokens", defaults[1])
    if not is_cpu:
        weights += sampler_state_bytes(num_seqs, shape.vocab_size)
    working = _engine_activations(shape, size, min(num_seqs, num_batched), num_batched, compute)
    awake = resident | kept | {"engine_weights": weights, "gradients": 0, "activations": working}
    margin = int(config.engine.sleep_margin_gib * GIB)
    gradients, activations = update_peak(config, shape, num_ranks) if is_training else (0, 0)
    working_set = {"gradients": gradients, "activations": activations, "torch_cache": int(CACHE_SHARE * activations)}
    update, depth = resident | held | working_set, recipe_depth(config)
    # At depth none the cache stays mapped beside the update.
    beside = max(sum(awake.values()), sum(update.values()) + weights if depth == "none" else 0)
    kv = plan_kv(
        config,
        shape,
        draft,
        num_replicas=max(1, num_ranks // size),
        num_seqs=min(num_seqs, num_batched),
        num_eval_prompts=num_eval_prompts,
        is_training=is_training,
        is_cpu=is_cpu,
        room=card_bytes - margin - beside,
        share_bytes=int(options.get("gpu_memory_utilization", 0) * card_bytes) - weights - working,
    )
    return Plan(
        card_bytes=card_bytes,
        margin_bytes=margin,
        depth=depth,
        kv=kv,
        generate=_in_order(awake | {"kv_cache": kv.bytes}),
        update=_in_order(update),
        wake_bytes=sum((resident | at_wake).values()) + weights,
        host=_host(config, held, weights, offload),
    )


def recipe_depth(config: Config) -> str:
    """The depth of DEPTHS that a recipe's engine.sleep is planned as."""
    return config.engine.sleep if config.engine.sleep in DEPTHS else DEPTHS[0]


def sampler_state_bytes(num_seqs: int, vocab_size: int) -> int:
    """What vLLM's GPU runner keeps with its weights: 0.70 GiB for 1,024 sequences and 151,936 tokens on an H200."""
    each, beside = SAMPLER_STATE_BYTES
    return int(each * num_seqs * vocab_size) + beside


def _held(config: Config, shape: ModelShape, num_ranks: int, *, is_training: bool) -> dict[str, int]:
    """Of the policy, between updates: FSDP2 shards every tensor over all ranks; AdamW has two moments in its dtype."""
    if not is_training:
        return {"policy_parameters": 0, "reference_model": 0, "optimizer": 0}
    compute, master = DTYPE_BYTES[config.policy.compute_dtype], DTYPE_BYTES[config.policy.dtype]
    shard = math.ceil(shape.num_parameters / num_ranks)
    reference = compute * shard if config.loss.kl_coef > 0 else 0
    return {"policy_parameters": master * shard, "reference_model": reference, "optimizer": 2 * master * shard}


def _is_aside(part: str, offload: str) -> bool:
    """Whether policy.offload has a part on the host while the engine generates."""
    return offload == "all" or (offload == "optimizer" and part == "optimizer")


def _host(config: Config, held: dict[str, int], weights: int, offload: str) -> dict[str, int]:
    aside = sum(number for part, number in held.items() if _is_aside(part, offload))
    backup = weights if config.engine.sleep == "1" else 0
    return {"policy.offload, pinned": aside, "engine.sleep=1, the engine's weights": backup}


def _in_order(parts: dict[str, int]) -> dict[str, int]:
    return {part: parts.get(part, 0) for part in LABELS}


def _engine_activations(shape: ModelShape, size: int, num_seqs: int, num_batched: int, compute: int) -> int:
    """vLLM's largest step: all tokens of a prefill through one layer, or the logits of all sequences.

    The build's profile run takes this much, whatever is generated later.
    """
    layer = num_batched * compute * (3 * shape.mlp_width // size + 4 * shape.hidden_size)
    sampling = num_seqs * shape.vocab_size * (SAMPLED_LOGIT_COPIES * FLOAT32 + compute)
    return max(layer, sampling)
