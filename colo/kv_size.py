"""How large a rank's KV cache should be, by what its engine has in flight at once."""

import math
from dataclasses import dataclass

from colo.config import Config
from colo.model_shape import DTYPE_BYTES, DraftShape, ModelShape

GPU_BLOCK_TOKENS, CPU_BLOCK_TOKENS = 16, 128
"""vLLM's block_size."""
KV_HEADROOM = 1.05
"""Beyond what is needed, for blocks that vLLM holds back."""
MIB = 1 << 20
MIN_CPU_KV_BYTES, MAX_CPU_KV_BYTES = 64 * MIB, 512 * MIB
"""The limits on CPU, where the KV cache takes memory of the host."""


@dataclass(frozen=True, kw_only=True)
class KvPlan:
    """The size of one rank's KV cache, in bytes."""

    bytes_per_token: int
    needed: int
    """For all sequences that vLLM runs at once, at full length."""
    least: int
    """For one sequence of full length and a block more, below which vLLM does not start."""
    room: int
    """Beside everything else while the engine is awake, and with engine.sleep=none also beside the update; negative
    where that alone is too much."""
    given: int | None
    """By the recipe."""
    is_cpu: bool
    num_running: int
    """Sequences that vLLM runs at once."""
    sequence_tokens: int
    """Of full length, in whole blocks."""

    @property
    def bytes(self) -> int:
        """What the cache gets."""
        if self.given is not None:
            return self.given
        fitting = min(self.needed, self.room)
        if self.is_cpu:
            fitting = max(MIN_CPU_KV_BYTES, min(fitting, MAX_CPU_KV_BYTES))
        return max(self.least, fitting)

    @property
    def num_sequences(self) -> int:
        """Of full length that it holds."""
        return self.bytes // max(1, self.bytes_per_token * self.sequence_tokens)


def plan_kv(
    config: Config,
    shape: ModelShape,
    draft: DraftShape,
    *,
    num_replicas: int,
    num_seqs: int,
    num_eval_prompts: int,
    is_training: bool,
    is_cpu: bool,
    room: int,
    share_bytes: int,
) -> KvPlan:
    """Size the cache by what a replica has in flight at once, at full length.

    A group's completions share the blocks of their prompt where the prefix cache is on, which it is by default. What
    does not fit waits or is preempted and computed again by vLLM: slower, and the same tokens.
    """
    rollout, options, size = config.rollout, config.engine.vllm, config.engine.tensor_parallel_size
    compute = DTYPE_BYTES[config.policy.compute_dtype]
    kv_dtype = str(options.get("kv_cache_dtype") or "auto")
    number_bytes = 1 if kv_dtype.startswith("fp8") else {"float32": 4, "auto": compute}.get(kv_dtype, 2)
    draft_bytes = math.ceil(draft.kv_numbers / size) * number_bytes
    per_token = shape.kv_bytes_per_token(size, number_bytes) + draft_bytes
    block = options.get("block_size") or (CPU_BLOCK_TOKENS if is_cpu else GPU_BLOCK_TOKENS)
    drafted = config.engine.speculative.get("num_speculative_tokens", 0)
    longest = _blocks(rollout.max_prompt_tokens + rollout.max_new_tokens + drafted, block)

    prompts = rollout.num_prompts + (config.num_extra_prompts if rollout.carry_over else 0) if is_training else 0
    running = min(math.ceil(prompts * rollout.group_size / num_replicas), num_seqs)
    is_shared = options.get("enable_prefix_caching", True)
    num_prompts = math.ceil(running / rollout.group_size) if is_shared else running
    completions = running * (_blocks(rollout.max_new_tokens + drafted, block) + block)
    tokens = num_prompts * _blocks(rollout.max_prompt_tokens, block) + completions
    evaluated = min(math.ceil(num_eval_prompts / num_replicas), num_seqs)
    tokens = max(tokens, evaluated * (longest + block))
    model_length = options.get("max_model_len", longest)
    least = (_blocks(max(longest, model_length + drafted), block) + block) * per_token

    given = options.get("kv_cache_memory_bytes")
    if given is None and options.get("num_gpu_blocks_override") is not None:
        given = options["num_gpu_blocks_override"] * block * per_token
    if given is None and "gpu_memory_utilization" in options and not is_cpu:
        given = max(0, share_bytes)
    return KvPlan(
        bytes_per_token=per_token,
        needed=max(least, math.ceil(KV_HEADROOM * tokens * per_token)),
        least=least,
        room=room,
        given=given,
        is_cpu=is_cpu,
        num_running=max(running, evaluated),
        sequence_tokens=longest,
    )


def _blocks(num_tokens: int, block: int) -> int:
    """Tokens of the blocks that hold so many."""
    return math.ceil(num_tokens / block) * block
