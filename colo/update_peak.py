"""What an update holds at its peak beyond what the policy holds between updates."""

import math

from colo.config import Config
from colo.model_shape import DTYPE_BYTES, FLOAT32, ModelShape

LOGIT_COPIES, SORTED_LOGIT_COPIES = 4, 5
"""[chunk, vocabulary] tensors in float32 at the peak of a chunk's backward, beside one in compute_dtype; the second
where tokens are dropped (colo/policy/logprobs.py)."""
MLP_GRADIENTS, HIDDEN_GRADIENTS = 2, 2
"""[tokens, MLP's width] and [tokens, hidden] tensors in compute_dtype at the peak of a layer's backward, beyond what
was stored for it."""


def micro_batches(config: Config, num_ranks: int) -> tuple[int, int]:
    """(Tokens of the largest micro-batch, micro-batches of an optimizer step) of one rank, at full length."""
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens
    num_rows = math.ceil(rollout.num_prompts * rollout.group_size / num_ranks / config.update.num_minibatches)
    in_a_batch = max(1, min(num_rows, config.batch.max_tokens // longest))
    # Shorter rows fill a micro-batch up to its limit.
    tokens = max(longest, min(config.batch.max_tokens, num_rows * longest))
    return tokens, math.ceil(num_rows / in_a_batch)


def update_peak(config: Config, shape: ModelShape, num_ranks: int) -> tuple[int, int]:
    """(Gradients, everything else that only an update holds) at its peak: the largest of three moments.

    1. The head's backward, with all that the layers stored: the root's parameters whole in compute_dtype, the logits of
       one chunk, and the head's gradient; with several ranks the last layer is gathered meanwhile.
    2. The last layer's backward: with policy.gradient_checkpointing its activations, its parameters whole (with several
       ranks also what they are gathered in, and the layer before it), and gradients; then, with its activations freed,
       their reduction in float32.
    3. The end of the backward: the root's gradients are reduced, all others are there. Then their norm, for which
       bfloat16 ones are copied to float32.

    Gradients of the micro-batch before are there at 1 and 2 where there is one.
    """
    compute, master = DTYPE_BYTES[config.policy.compute_dtype], DTYPE_BYTES[config.policy.dtype]
    tokens, num_micro = micro_batches(config, num_ranks)
    is_alone = num_ranks == 1
    gradients = master * math.ceil(shape.num_parameters / num_ranks)
    before = gradients if num_micro > 1 else 0

    recomputes = config.policy.gradient_checkpointing
    layers = shape.num_layers * shape.hidden_size * compute if recomputes else shape.stored.bytes(compute)
    last_norm = shape.hidden_size * (FLOAT32 + 3 * compute)
    stored = tokens * (layers + last_norm) + compute * shape.root_parameters

    chunk = min(tokens, config.policy.logprob_chunk_tokens)
    copies = SORTED_LOGIT_COPIES if config.scored.truncates else LOGIT_COPIES
    head_gradient = compute * shape.vocab_size * shape.hidden_size
    head = chunk * shape.vocab_size * (copies * FLOAT32 + compute) + head_gradient

    block = compute * shape.block_parameters
    of_layer = tokens * shape.stored_of_layer.bytes(compute)
    in_flight = tokens * compute * (MLP_GRADIENTS * shape.mlp_width + HIDDEN_GRADIENTS * shape.hidden_size)
    backward = in_flight + (of_layer if recomputes else 0) + block * (2 if is_alone else 5)
    # The next layer's backward has begun before a reduction between ranks is over.
    reduction = int((FLOAT32 + FLOAT32 / num_ranks) * shape.block_parameters) + block * (1 if is_alone else 4)
    layer = max(backward, reduction - (0 if recomputes else of_layer)) + head_gradient
    # The reduced gradient in float32 is the gradient itself where the master is float32 and there is none before; a
    # bfloat16 master's is cast, and with one before it the two are added.
    is_first = num_micro == 1
    reduced_root = (0 if is_first else FLOAT32) if master == FLOAT32 else FLOAT32 + (0 if is_first else master)
    moments = [
        (before, stored + head + (0 if is_alone else block)),
        (before, stored + layer),
        (gradients, int((compute + FLOAT32 + reduced_root / num_ranks) * shape.root_parameters)),
        (gradients, FLOAT32 * math.ceil(shape.num_parameters / num_ranks) if master < FLOAT32 else 0),
    ]
    return max(moments, key=sum)
