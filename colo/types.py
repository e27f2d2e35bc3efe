"""Records that pass between the rooms: shapes and units here, behaviour elsewhere.

Axis letters, where a tensor has two or more axes: `P` prompts on this replica, `G` completions per
group, `B` rows, `T` tokens, `V` vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """This rank's part of a checkpoint tensor that is spread over the ranks by its rows.

    Example: TensorShard(shape=(320, 64), start=10240, local=rows_160_to_319)
    """

    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """The place of the first element of `local` in the whole, in row-major order."""
    local: Tensor
    """What the policy trains, read and never written by others. Its elements, in row-major order, are the places
    [start, start + numel) of the whole; it may be empty, and a view with any strides."""


NamedTensors = Iterable[tuple[str, Tensor | TensorShard]]
"""(checkpoint name, whole tensor or this rank's part of it), in one order on every rank: what the policy hands to the
engine."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt source, tokenized.

    Example: Prompt(row=7, token_ids=[1, 330, 18], text="What is 2 + 3?", fields={"answer": "5"})
    """

    row: int
    """0-based row in its source; a JSONL file's line is `row + 1`."""
    token_ids: list[int]
    """[T] with the chat template applied once and exactly one BOS where the tokenizer has one."""
    text: str
    """What a person reads: the raw prompt, or the last message's content."""
    fields: dict[str, Any]
    """The row's other fields, handed to reward functions by name."""


@dataclass(frozen=True, kw_only=True)
class WeightVersionSpan:
    """Tokens [start, end) of a completion were sampled from the weights labelled `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to sample.

    Example: Request(slot=3, sample=0, prompt_token_ids=[1, 330, 18], seed=991, max_new_tokens=16)
    """

    slot: int
    """The prompt's position in the step, over all replicas."""
    sample: int
    """0 .. group_size - 1 within the prompt's group."""
    prompt_token_ids: list[int]
    seed: int
    """Derived from (run seed, step, slot, sample): equal on the ranks of a tensor-parallel group."""
    max_new_tokens: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, for all requests of a call."""

    temperature: float
    """0 is greedy."""
    top_p: float
    top_k: int
    """0 keeps all tokens."""
    stop: tuple[str, ...]
    """Strings that end a completion, beside the model's own end tokens."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the engine sampled for one request, and what it says about it."""

    slot: int
    sample: int
    token_ids: list[int]
    """[T] sampled tokens, the terminal one included."""
    logprobs: list[float]
    """[T] the engine's logprob of each sampled token, in nats; never missing, never padded."""
    finish_reason: str
    """"stop", "length" (ran into max_new_tokens) or "abort"."""
    spans: list[WeightVersionSpan]
    """They cover [0, T) exactly."""
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""


@dataclass(kw_only=True)
class Group:
    """The completions of one prompt, and their rewards."""

    slot: int
    prompt: Prompt
    completions: list[Completion]
    """[G] in order of `sample`."""
    rewards: list[float] = field(default_factory=list)
    """[G] weighted sums over the reward functions; empty until scored."""
    texts: list[str] = field(default_factory=list)
    """[G] decoded completions, as the reward functions read them; empty until scored."""


@dataclass(kw_only=True)
class CarriedGroup:
    """A prompt whose completions are sampled over several rollouts."""

    prompt: Prompt
    step: int
    """In which it was first submitted."""
    slot: int
    """Its place among the prompts that were new in that step, over all replicas."""
    first_step: int
    """In which the first of its tokens was sampled; where it has none, the last in which it was submitted."""
    completions: list[Completion]
    """[G] in order of `sample`, as far as they are; one with the finish reason "abort" goes on."""


@dataclass(kw_only=True)
class Rollout:
    """What a step trains on, of one replica, the same on each rank of its tensor-parallel group."""

    groups: list[Group]
    """The replica's groups, in order of `slot`."""
    first_step: int
    """The step in which the first of its tokens was sampled, over all replicas."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Reduced over all ranks: equal everywhere."""


@dataclass(kw_only=True)
class MicroBatch:
    """Rows for one forward and backward, right-padded to the longest.

    Position t describes token t, which is predicted from the tokens before it.
    """

    token_ids_BT: Tensor
    """[B, T] int64; padding is token 0 and never trains."""
    loss_mask_BT: Tensor
    """[B, T] bool, True on completion tokens that train; column 0 is always False."""
    engine_logprobs_BT: Tensor
    """[B, T] float32 nats; 0 off the mask, where nothing reads it."""
    ages_BT: Tensor
    """[B, T] int32: optimizer updates between the weights that sampled a loss token and the policy's when the step
    began; 0 off the mask."""
    advantages_B: Tensor
    """[B] float32."""


@dataclass(kw_only=True)
class Batch:
    """One rank's share of a step's completions."""

    minibatches: list[list[MicroBatch]]
    """One list per optimizer step of an epoch. Ranks agree on the outer length, not on the inner one."""
    max_new_tokens: int
    """The length limit of a completion, which Dr. GRPO divides by."""
    metrics: dict[str, float] = field(default_factory=dict)
    """This rank's own counts, for `policy.update` to reduce: names end in what is summed."""
