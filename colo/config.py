"""Every knob: its default, unit and limits. A recipe sets some of them, the command line overrides.

Checks that need one field alone are here, in `__post_init__`; checks that need several, or the world
size, are in `check_config`. Each raises a ValueError whose first line names the option, the limit and
the value. Nothing assigns to a config after `colo.recipe.load_config` has built it.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from colo.installed import (
    ENGINE_ARGS,
    SPECULATIVE_CONFIG,
    check_vllm_options,
    is_installed,
    known_choices,
)

ALGORITHMS = ("grpo", "dr_grpo", "rloo")
SCHEDULES = ("on_policy", "one_off")
DEPTHS = ("none", "kv", "1", "2")
"""How deep an engine can sleep."""
SLEEP_DEPTHS = (*DEPTHS, "auto")
TRANSPORTS = ("auto", "peer", "gather")
PROOFS = ("every", "first", "off")
DTYPES = ("float32", "bfloat16")
OFFLOADS = ("none", "optimizer", "all")
MASKING = ("token_mask", "sequence_mask", "geometric_mask")
CORRECTIONS = ("off", "token_truncate", "sequence_truncate", *MASKING)
LOGPROBS = ("auto", "raw", "processed")
NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling options at the values at which they change nothing."""
TRUNCATING = ("top_p", "top_k", "min_p")
TINY = "tiny:"
TINY_FAMILIES = ("qwen3", "qwen2", "llama", "gemma3", "qwen3_moe")
OWNED_BY_COLO = (
    "model",
    "tensor_parallel_size",
    "data_parallel_size",
    "pipeline_parallel_size",
    "distributed_executor_backend",
    "enable_sleep_mode",
    "logprobs_mode",
    "seed",
    "speculative_config",
    "spec_method",
    "spec_model",
    "spec_tokens",
    "tokenizer",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "data_parallel_rank",
    "nnodes",
    "runner",
)
"""vLLM options that colo sets itself; in `engine.vllm` they are refused."""
ONE_SIDED = {
    "logits_processors": "they change what the engine draws from, and the policy applies none",
    "watermark_config": "a watermark decides what is drawn, and no logprob says so",
    "diffusion_config": "the policy scores tokens from left to right",
    "override_generation_config": "requests bring all of their options, from rollout.*: it would have no effect",
    "hf_config_path": "the policy reads the config.json of `model`",
    "hf_overrides": "the policy reads the config.json of `model`",
    "quantization": "a reload would not quantise",
    "quantization_config": "a reload would not quantise",
}
"""vLLM options that would make the engine's distribution another than the policy's, and why; in `engine.vllm` they are
refused unless they are empty."""
ROUNDING_ALONE = {"hf_overrides": {"head_dtype"}}
"""Keys of ONE_SIDED options that change how exactly the engine computes, and not what."""
OWNED_BY_VLLM = (
    "target_model_config",
    "target_parallel_config",
    "draft_model_config",
    "draft_parallel_config",
    "tensor_parallel_size",
)
"""Fields of vLLM's speculative_config that it fills in itself; in `engine.speculative` they are refused."""
WITHOUT_DRAFT_FOLDER = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods of speculation whose `model`, if they take one, is no folder."""
MAX_WAIT_S = 10**8
"""Three years; torch cannot count to infinity."""
MAX_SEED = 2**31 - 1
"""numpy takes 32 bits, and each replica's engine adds its number."""
NOT_TRAINED = {"vision_config": "vision", "audio_config": "audio"}
"""What a model's config.json has where the model takes more than text; such a model is refused."""


def _check(option: str, holds: bool, limit: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{option} must be {limit}, got {value!r}")


def _at_least(section: str, config: Any, **limits: float) -> None:
    for name, low in limits.items():
        value = getattr(config, name)
        _check(f"{section}{name}", value >= low, f"at least {low}", value)


def _check_finite(section: str, tree: dict[str, Any]) -> None:
    for name, value in tree.items():
        if isinstance(value, dict):
            _check_finite(f"{section}{name}.", value)
        elif isinstance(value, float):
            _check(f"{section}{name}", math.isfinite(value), "a finite number", value)


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    _check(option, value in choices, f"one of {', '.join(choices)}", value)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What a token's logprob is of: softmax(logits / temperature), renormalised over the tokens that are kept.

    Example: Distribution(temperature=0.7, top_p=0.9)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be dropped."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(kw_only=True)
class RolloutConfig:
    """What is sampled in a step, and how."""

    num_prompts: int = 8
    """Prompts per step, over all replicas; divides by their number and by update.num_minibatches."""
    group_size: int = 8
    """Completions per prompt; at least 2, since the group is its own baseline."""
    max_new_tokens: int = 64
    """Length limit of a completion, in tokens."""
    temperature: float = 1.0
    """At least 0.01."""
    top_p: float = 1.0
    """In (0, 1]: the likeliest tokens that together have this probability are kept."""
    top_k: int = 0
    """This many of the likeliest tokens are kept; 0 keeps all."""
    min_p: float = 0.0
    """In [0, 1]: tokens that are less likely than this share of the likeliest one's probability are dropped."""
    presence_penalty: float = 0.0
    """In [-2, 2]: taken off the logit of a token that the completion has already."""
    frequency_penalty: float = 0.0
    """In [-2, 2]: likewise, for each time that the completion has it."""
    repetition_penalty: float = 1.0
    """Above 0: logits of tokens that the prompt or the completion has are divided by it, negative ones multiplied."""
    logprobs: str = "auto"
    """What engine and policy both score (docs/logprobs.md): processed (after the temperature, over the tokens that
    top_p, top_k and min_p keep; not with penalties), raw (the whole vocabulary at temperature 1, whatever the tokens
    were drawn from), auto (raw with any of top_p, top_k, min_p and the penalties, else processed)."""
    max_prompt_tokens: int = 512
    """Longest prompt taken, in tokens after the chat template."""
    long_prompts: str = "refuse"
    """A longer prompt stops the run ("refuse", naming its line) or is left out and counted ("drop")."""
    stop: list[str] = field(default_factory=list)
    """Strings that end a completion, beside the model's own end tokens; detokenizes while sampling."""
    save: int = 0
    """Write rollouts/step-N.jsonl every this many steps; 0 never. For `colo replay` each such step's checkpoint is
    saved too, and kept: as much disk as a checkpoint takes, for each saved rollout."""
    carry_over: bool = False
    """End a rollout when enough groups are complete; completions under way go on in the next, with newer weights."""
    carry_over_extra: int = 0
    """Prompts under way beyond num_prompts, over all replicas: at most num_prompts, divides by the number of replicas;
    0 is num_prompts with carry_over."""
    max_carried_updates: int = 4
    """Optimizer updates that a completion may span with carry_over, at least those of a step; one that would pass it is
    finished before the rollout ends."""

    def __post_init__(self) -> None:
        _at_least("rollout.", self, num_prompts=1, group_size=2, max_new_tokens=1, top_k=0, max_prompt_tokens=1, save=0)
        # vLLM raises a lower one to 0.01, and the policy would divide by another number.
        _check("rollout.temperature", self.temperature >= 0.01, "at least 0.01", self.temperature)
        _check("rollout.top_p", 0 < self.top_p <= 1, "in (0, 1]", self.top_p)
        _check("rollout.min_p", 0 <= self.min_p <= 1, "in [0, 1]", self.min_p)
        self._check_penalties()
        _check("rollout.stop", all(self.stop), "strings that are not empty", self.stop)
        self._check_carry_over()
        _one_of("rollout.long_prompts", self.long_prompts, ("refuse", "drop"))

    @property
    def truncation(self) -> dict[str, float]:
        """Which of top_p, top_k and min_p drop tokens, with their values."""
        return {name: value for name, value in self._shaping().items() if name in TRUNCATING}

    @property
    def penalties(self) -> dict[str, float]:
        """Which penalties are applied, with their values."""
        return {name: value for name, value in self._shaping().items() if name not in TRUNCATING}

    def _shaping(self) -> dict[str, float]:
        return {name: getattr(self, name) for name, neutral in NEUTRAL.items() if getattr(self, name) != neutral}

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(f"rollout.{name}", -2 <= value <= 2, "in [-2, 2]", value)
        _check("rollout.repetition_penalty", self.repetition_penalty > 0, "above 0", self.repetition_penalty)
        _one_of("rollout.logprobs", self.logprobs, LOGPROBS)
        if self.logprobs == "processed":
            # Processed logprobs are after the penalties, which depend on all tokens before; the policy applies none.
            for name, value in self.penalties.items():
                limit = f"{NEUTRAL[name]} with rollout.logprobs=processed (the policy's side applies no penalty)"
                _check(f"rollout.{name}", False, limit, value)

    def _check_carry_over(self) -> None:
        _at_least("rollout.", self, carry_over_extra=0, max_carried_updates=1)
        extra = self.carry_over_extra
        if not self.carry_over:
            _check("rollout.carry_over_extra", extra == 0, "0 without rollout.carry_over", extra)
            return
        limit = f"at most rollout.num_prompts {self.num_prompts}"
        _check("rollout.carry_over_extra", extra <= self.num_prompts, limit, extra)
        # The engine would look for one in what was sampled since the update alone.
        _check("rollout.stop", not self.stop, "empty with rollout.carry_over", self.stop)
        for name in ("presence_penalty", "frequency_penalty"):  # it would count the tokens since the update alone
            value = getattr(self, name)
            _check(f"rollout.{name}", value == 0, "0.0 with rollout.carry_over", value)


@dataclass(kw_only=True)
class EngineConfig:
    """The vLLM engine in each process."""

    tensor_parallel_size: int = 1
    """Consecutive ranks that share one engine; divides the world size."""
    sleep: str = "2"
    """How deep the engine sleeps while the policy updates: none, kv (KV cache dropped), 1 (and weights to host), 2 (and
    weights dropped), auto (2 at first, then the shallowest that leaves the largest update seen its memory)."""
    sleep_margin_gib: float = 2.0
    """GiB that `auto` leaves free beside that update."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Passed to vllm.LLM under vLLM's own names (gpu_memory_utilization, max_model_len, enforce_eager, ...)."""
    speculative: dict[str, Any] = field(default_factory=dict)
    """Passed to vLLM as its speculative_config (method, model, num_speculative_tokens, ...); empty is off."""
    draft_floor: float = 0.5
    """In [0, 1]; an acceptance of draft tokens below this share of its running mean is an alarm."""

    def __post_init__(self) -> None:
        _at_least("engine.", self, tensor_parallel_size=1, sleep_margin_gib=0)
        _one_of("engine.sleep", self.sleep, SLEEP_DEPTHS)
        for name in self.vllm:
            if name in OWNED_BY_COLO:
                instead = "engine.speculative has it" if name.startswith("spec") else "colo sets it"
                raise ValueError(f"engine.vllm.{name} must be left out ({instead}), got {self.vllm[name]!r}")
        self._check_one_sided()
        if "enable_lora" in self.vllm:
            raise ValueError(
                f"engine.vllm.enable_lora must be left out (LoRA: not built yet), got {self.vllm['enable_lora']!r}"
            )
        kept = self.vllm.get("sleep_preserve_parameter_names", [])
        is_list = isinstance(kept, list) and all(isinstance(name, str) for name in kept)
        _check("engine.vllm.sleep_preserve_parameter_names", is_list, "a list of strings", kept)
        _check("engine.draft_floor", 0 <= self.draft_floor <= 1, "in [0, 1]", self.draft_floor)
        if self.speculative:
            self._check_speculative()

    def _check_one_sided(self) -> None:
        for name, why in ONE_SIDED.items():
            value, allowed = self.vllm.get(name), ROUNDING_ALONE.get(name, set())
            if value and not (isinstance(value, dict) and value.keys() <= allowed):
                limit = f"left out, but for {', '.join(allowed)}" if allowed else "left out"
                raise ValueError(f"engine.vllm.{name} must be {limit} ({why}), got {value!r}")

    def _check_speculative(self) -> None:
        options = self.speculative
        for name in OWNED_BY_VLLM:
            if name in options:
                raise ValueError(f"engine.speculative.{name} must be left out (vLLM sets it), got {options[name]!r}")
        for name in ("method", "model"):
            if options.get(name) is not None:
                _check(f"engine.speculative.{name}", isinstance(options[name], str), "a string", options[name])
        has_kind = bool(options.get("method") or options.get("model"))
        _check("engine.speculative", has_kind, "a map with method or model", options)
        number = options.get("num_speculative_tokens")
        is_number = type(number) is int and number >= 1
        _check("engine.speculative.num_speculative_tokens", is_number, "an integer, at least 1", number)
        if options.get("method") == "extract_hidden_states":
            raise ValueError(
                "engine.speculative.method must be one that drafts, got 'extract_hidden_states': it only writes files"
            )
        if options.get("rejection_sample_method") == "synthetic":
            raise ValueError(
                "engine.speculative.rejection_sample_method must be standard or block, got 'synthetic': it accepts "
                "tokens that the policy would not have sampled"
            )
        if self.vllm.get("disable_log_stats"):
            raise ValueError(
                f"engine.vllm.disable_log_stats must be left out with engine.speculative (acceptance is read from the "
                f"stats), got {self.vllm['disable_log_stats']!r}"
            )


@dataclass(kw_only=True)
class ReloadConfig:
    """How the engine is loaded with what the policy holds."""

    transport: str = "auto"
    """How a rank reads the shards of others: peer (memory handles to ranks of its host), gather (all ranks' shards go
    round in buckets), auto (peer where it works, else gather)."""
    proof: str = "every"
    """Which reloads are checked to have left the engine equal to the policy: every, first or off (in YAML "off")."""
    bucket_mib: int = 256
    """What a gather holds at a time, in MiB."""

    def __post_init__(self) -> None:
        _one_of("reload.transport", self.transport, TRANSPORTS)
        _one_of("reload.proof", self.proof, PROOFS)
        _at_least("reload.", self, bucket_mib=1)


@dataclass(kw_only=True)
class PolicyConfig:
    """The trained model on this rank's shard."""

    dtype: str = "float32"
    """Of the master weights and the optimizer's moments."""
    compute_dtype: str = "bfloat16"
    """Of the forward and backward, and of the engine's weights."""
    gradient_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass: less memory, a third more time."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at a time; [tokens, vocabulary] in float32 never exists whole."""
    offload: str = "none"
    """What lies in pinned host memory, not on the device, while the engine generates (docs/memory.md): none, optimizer
    (AdamW's moments), all (and the parameters, the reference's too)."""

    def __post_init__(self) -> None:
        _one_of("policy.offload", self.offload, OFFLOADS)
        _one_of("policy.dtype", self.dtype, DTYPES)
        _one_of("policy.compute_dtype", self.compute_dtype, DTYPES)
        _at_least("policy.", self, logprob_chunk_tokens=1)


@dataclass(kw_only=True)
class BatchConfig:
    """How a step's completions are cut into micro-batches; the gradient does not depend on it."""

    max_tokens: int = 8192
    """Tokens of one micro-batch, padding counted; a longer sequence goes alone."""

    def __post_init__(self) -> None:
        _at_least("batch.", self, max_tokens=1)


@dataclass(kw_only=True)
class UpdateConfig:
    """AdamW, once or several times per rollout."""

    lr: float = 1e-6
    """Peak learning rate."""
    schedule: str = "constant"
    """After the warm-up, over the run's optimizer steps: constant, linear or cosine."""
    warmup_steps: int = 0
    """Optimizer steps in which the learning rate rises linearly to its peak."""
    min_lr_ratio: float = 0.0
    """Where a decay ends, as a share of the peak; in [0, 1]."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """Global gradient norm is clipped to this; 0 clips nothing."""
    num_minibatches: int = 1
    """Optimizer steps per epoch over a rollout; divides rollout.num_prompts."""
    num_epochs: int = 1
    """Passes over a rollout."""

    def __post_init__(self) -> None:
        _at_least(
            "update.", self, lr=0, warmup_steps=0, weight_decay=0, max_grad_norm=0, num_minibatches=1, num_epochs=1
        )
        _one_of("update.schedule", self.schedule, ("constant", "linear", "cosine"))
        _check("update.min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "in [0, 1]", self.min_lr_ratio)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _check(f"update.{name}", 0 <= value < 1, "in [0, 1)", value)
        _check("update.eps", self.eps > 0, "above 0", self.eps)


@dataclass(kw_only=True)
class LossConfig:
    """Knobs of the policy loss that `algorithm` names."""

    clip_low: float = 0.2
    """The ratio to the rollout's policy is clipped at 1 - clip_low; in (0, 1]. No effect with one optimizer step."""
    clip_high: float = 0.2
    """... and at 1 + clip_high; above 0."""
    kl_coef: float = 0.0
    """Weight of the k3 KL to the frozen starting model; above 0 a reference copy is loaded."""
    correction: str = "token_truncate"
    """Weight of a token by its probability ratio policy / engine (colo/rl/corrections.py): off (in YAML "off"),
    token_truncate (min(ratio, correction_high)), token_mask (ratio in [correction_low, correction_high], else 0),
    sequence_truncate and sequence_mask (the same with the product over the completion), geometric_mask (1 where the
    completion's geometric mean is in the limits, else 0)."""
    correction_low: float = 0.0
    """Lower limit of a correction that masks, in [0, 1]; 0 is none."""
    correction_high: float = 2.0
    """Cap, or upper limit, at least 1; no effect with correction off. geometric_mask wants one close to 1 (1.001)."""
    mask_truncated: bool = False
    """Leave completions that ran into rollout.max_new_tokens out of the loss; they keep their part in the baseline."""

    def __post_init__(self) -> None:
        _check("loss.clip_low", 0 < self.clip_low <= 1, "in (0, 1]", self.clip_low)
        _check("loss.clip_high", self.clip_high > 0, "above 0", self.clip_high)
        _at_least("loss.", self, kl_coef=0, correction_high=1)
        _one_of("loss.correction", self.correction, CORRECTIONS)
        low = self.correction_low
        if self.correction not in MASKING:
            _check(
                "loss.correction_low", low == 0, f"0 with loss.correction={self.correction}, which masks nothing", low
            )
        _check("loss.correction_low", 0 <= low <= 1, "in [0, 1]", low)
        _check(
            "loss.correction_low", low < self.correction_high, f"below loss.correction_high {self.correction_high}", low
        )


@dataclass(kw_only=True)
class GapConfig:
    """When the gap, the policy's logprob minus the engine's of the same token, is an alarm."""

    warn: float = 0.1
    """A step whose gap/mean_abs, in nats, is above this is warned of; 0 is off."""
    stop: float = 0.0
    """... and above this ends the run, before the step's first optimizer update; 0 is off."""
    warn_growth: float = 3.0
    """A gap/trend above this is warned of; above 1, or 0 for off. Weights that are stale show as a gap that grows."""
    window: int = 20
    """Steps that gap/trend looks back over: the median of the later half over that of the earlier; at least 2."""

    def __post_init__(self) -> None:
        _at_least("gap.", self, warn=0, stop=0, window=2)
        _check("gap.warn_growth", self.warn_growth == 0 or self.warn_growth > 1, "0 or above 1", self.warn_growth)


@dataclass(kw_only=True)
class ScoringConfig:
    """How reward functions are called."""

    timeout_s: float = 10.0
    """Limit for one completion's score by one function; a longer one is recorded as a time-out."""
    timeout_reward: float = 0.0
    """The reward of a time-out."""

    def __post_init__(self) -> None:
        _check("scoring.timeout_s", self.timeout_s > 0, "above 0", self.timeout_s)


@dataclass(kw_only=True)
class RanksConfig:
    """The process group."""

    timeout_s: float = 7200.0
    """How long a rank waits for another in a collective before the run fails; longer than the longest rollout."""
    notice_s: float = 30.0
    """A wait says what it waits for after this long, and again each time it has passed."""

    def __post_init__(self) -> None:
        _check("ranks.timeout_s", 0 < self.timeout_s <= MAX_WAIT_S, f"above 0 and at most {MAX_WAIT_S}", self.timeout_s)
        _check("ranks.notice_s", self.notice_s > 0, "above 0", self.notice_s)


@dataclass(kw_only=True)
class TrackingConfig:
    """Where metrics go beside metrics.jsonl."""

    tensorboard: bool = True
    """Write run_dir/tensorboard."""
    wandb_project: str = ""
    """Log to this Weights & Biases project; empty is off. Needs the package wandb."""


@dataclass(kw_only=True)
class Config:
    """A run. Recipes in recipes/ are values of this."""

    model: str = MISSING
    """A folder in the Hugging Face layout, or tiny:FAMILY (random, two layers, made in run_dir; FAMILY is qwen3, qwen2,
    llama, gemma3 or qwen3_moe)."""
    run_dir: str = MISSING
    """Everything the run leaves behind; made if it is missing."""
    prompts: str = MISSING
    """A JSONL file (`prompt` or chat `messages`, and any fields), or the dotted path of a function that returns such
    rows."""
    reward: Any = MISSING
    """The dotted path of a function, or a map of dotted path to weight."""
    num_steps: int = MISSING
    """Steps of the whole run, those before a resume included; a step is one rollout and its updates."""
    schedule: str = "on_policy"
    """on_policy, or one_off: a step trains on the rollout that was sampled in the step before, with the weights before
    that step's updates (the first step on its own)."""
    algorithm: str = "grpo"
    """grpo, dr_grpo or rloo; its knobs are under loss."""
    seed: int = 0
    """Prompts, samples and initial state follow from it."""
    eval_prompts: str = ""
    """Held-out prompts, as for prompts; empty is none."""
    eval_every: int = 0
    """Score eval_prompts, greedily, before the first step, every this many steps and at the end; 0 never."""
    checkpoint_every: int = 0
    """Save after every this many steps; 0 only at the end, and when stopped by SIGTERM."""
    keep_checkpoints: int = 2
    """Older ones are deleted once a newer one is complete."""
    resume: str = "auto"
    """auto (the newest checkpoint in run_dir, else a new run), never (a run_dir that holds a run is refused), or a
    checkpoint's folder (later ones in run_dir are deleted). A run that goes on in its run_dir keeps its options, but
    for those in colo/resume.py."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reload: ReloadConfig = field(default_factory=ReloadConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    gap: GapConfig = field(default_factory=GapConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        _at_least("", self, num_steps=1, eval_every=0, checkpoint_every=0, keep_checkpoints=1, seed=0)
        _check("seed", self.seed <= MAX_SEED, f"at most {MAX_SEED}", self.seed)
        _check("run_dir", bool(self.run_dir), "a folder's path", self.run_dir)
        _check_finite("", dataclasses.asdict(self))
        _one_of("algorithm", self.algorithm, ALGORITHMS)
        self._check_schedule()
        self._check_scored()
        _check("eval_every", not self.eval_every or bool(self.eval_prompts), "0 without eval_prompts", self.eval_every)
        if isinstance(self.reward, dict):
            weights = self.reward.values()
            _check(
                "reward",
                bool(weights) and all(type(w) in (int, float) for w in weights),
                "a map of dotted path to number",
                self.reward,
            )
        else:
            _check(
                "reward",
                isinstance(self.reward, str) and "." in self.reward,
                "a dotted path, or a map of dotted path to weight",
                self.reward,
            )
        if self.model.startswith(TINY):
            _one_of("model", self.model.removeprefix(TINY), TINY_FAMILIES)

    def _check_scored(self) -> None:
        if self.scored.truncates:
            # The reference keeps other tokens than the policy: where it drops one, KL(policy || reference) is infinite.
            options = ", ".join(f"rollout.{name}" for name in self.rollout.truncation)
            limit = f"0 with rollout.logprobs=processed and {options} (the reference would drop other tokens)"
            _check("loss.kl_coef", self.loss.kl_coef == 0, limit, self.loss.kl_coef)
        if self.engine.speculative:
            min_p = self.rollout.min_p
            _check("rollout.min_p", min_p == 0, "0.0 with engine.speculative (vLLM refuses it there)", min_p)

    def _check_schedule(self) -> None:
        _one_of("schedule", self.schedule, SCHEDULES)
        if not self.rollout.carry_over:
            return
        # Each bounds how old weights may be; together they would add up to a bound that no option names.
        _check("schedule", self.schedule == "on_policy", "on_policy with rollout.carry_over", self.schedule)
        _check(
            "rollout.max_carried_updates",
            self.max_carried_steps >= 1,
            f"at least update.num_minibatches x update.num_epochs {self.updates_per_step}",
            self.rollout.max_carried_updates,
        )

    @property
    def reward_weights(self) -> dict[str, float]:
        """Dotted path to weight, whichever way `reward` was written."""
        return (
            {path: float(w) for path, w in self.reward.items()} if isinstance(self.reward, dict) else {self.reward: 1.0}
        )

    @property
    def logprobs_mode(self) -> str:
        """vLLM's mode, which with `scored` makes engine and policy score one distribution.

        Raw logprobs are before the temperature and everything else, processed ones after all of it and renormalised.
        """
        mode = self.rollout.logprobs
        if mode == "auto":
            mode = "raw" if self.rollout.truncation or self.rollout.penalties else "processed"
        return f"{mode}_logprobs"

    @property
    def scored(self) -> Distribution:
        """What the policy scores tokens under: the distribution of the engine's logprobs."""
        if self.logprobs_mode == "raw_logprobs":
            return Distribution()
        rollout = self.rollout
        return Distribution(
            temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, min_p=rollout.min_p
        )

    @property
    def unscored(self) -> dict[str, float]:
        """Sampling options, with their values, that shape what is drawn and that neither side's logprobs know of."""
        if self.logprobs_mode == "processed_logprobs":
            return {}
        rollout = self.rollout
        heat = {"temperature": rollout.temperature} if rollout.temperature != 1 else {}
        return heat | rollout.truncation | rollout.penalties

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step."""
        return self.update.num_minibatches * self.update.num_epochs

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.num_steps * self.updates_per_step

    @property
    def max_carried_steps(self) -> int:
        """Over how many steps' updates a group may be carried."""
        return self.rollout.max_carried_updates // self.updates_per_step

    @property
    def num_extra_prompts(self) -> int:
        """With carry-over, prompts under way beyond those that a step trains on, over all replicas."""
        return self.rollout.carry_over_extra or self.rollout.num_prompts


def check_config(config: Config, world_size: int, *, is_training: bool = True) -> None:
    """Refuse what no single field can refuse, before vLLM is imported or a model is read.

    Args:
        config: The run's.
        world_size: Ranks of all hosts.
        is_training: False for an evaluation, which has no steps to deal over replicas and writes no metrics.

    Raises:
        ValueError: sizes that do not divide, a folder or file that is not there, a key of engine.vllm or
            engine.speculative that vLLM does not know, or a package that is not installed.
    """
    size = config.engine.tensor_parallel_size
    if world_size % size:
        raise ValueError(f"engine.tensor_parallel_size must divide the number of ranks {world_size}, got {size}")
    if is_training:
        _check_training(config, world_size)
    check_vllm_options("engine.vllm", config.engine.vllm, ENGINE_ARGS)
    if config.engine.speculative:
        _check_drafts(config.engine)
    if not config.model.startswith(TINY):
        _check_model_folder(config.model)
    for option in ("prompts", "eval_prompts"):
        source = getattr(config, option)
        if source and ("/" in source or source.endswith(".jsonl")) and not Path(source).is_file():
            raise ValueError(f"{option} must be a JSONL file that exists, or a function's dotted path, got {source!r}")
    if config.resume not in ("auto", "never") and not Path(config.resume).is_dir():
        raise ValueError(f"resume must be auto, never or a checkpoint's folder, got {config.resume!r}")
    needed = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    limit = config.engine.vllm.get("max_model_len", needed)
    _check("engine.vllm.max_model_len", type(limit) is int, "an integer", limit)
    if needed > limit:
        raise ValueError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens must be at most engine.vllm.max_model_len {limit}, "
            f"got {needed}"
        )


def _check_training(config: Config, world_size: int) -> None:
    size, prompts = config.engine.tensor_parallel_size, config.rollout.num_prompts
    replicas = world_size // size
    if prompts % replicas:
        raise ValueError(
            f"rollout.num_prompts must be a multiple of the {replicas} engine replicas "
            f"({world_size} ranks / engine.tensor_parallel_size {size}), got {prompts}"
        )
    if config.rollout.carry_over_extra % replicas:
        raise ValueError(
            f"rollout.carry_over_extra must be a multiple of the {replicas} engine replicas, "
            f"got {config.rollout.carry_over_extra}"
        )
    if prompts % config.update.num_minibatches:
        raise ValueError(
            f"update.num_minibatches must divide rollout.num_prompts {prompts}, got {config.update.num_minibatches}"
        )
    project = config.tracking.wandb_project
    if project and not is_installed("wandb"):
        raise ValueError(
            f"tracking.wandb_project must be empty without the package wandb (pip install 'colo[wandb]'), "
            f"got {project!r}"
        )


def _check_drafts(engine: EngineConfig) -> None:
    options = engine.speculative
    check_vllm_options("engine.speculative", options, SPECULATIVE_CONFIG)
    method, model = options.get("method"), options.get("model")
    methods = known_choices(SPECULATIVE_CONFIG[0], "SpeculativeMethod")
    if method is not None and methods:
        _one_of("engine.speculative.method", method, tuple(sorted(methods)))
    if method == "suffix" and not is_installed("arctic_inference"):
        raise ValueError(
            "engine.speculative.method must be another one without the package arctic-inference "
            "(pip install arctic-inference==0.1.1), got 'suffix'"
        )
    needs_folder = method == "draft_model" or (model is not None and method not in WITHOUT_DRAFT_FOLDER)
    if needs_folder and not (model and (Path(model) / "config.json").is_file()):
        raise ValueError(f"engine.speculative.model must be a folder that holds config.json, got {model!r}")
    size, draft_size = engine.tensor_parallel_size, options.get("draft_tensor_parallel_size")
    if method in (None, "draft_model") and draft_size not in (None, size):
        raise ValueError(
            f"engine.speculative.draft_tensor_parallel_size must be engine.tensor_parallel_size {size}, "
            f"got {draft_size!r}"
        )


def _check_model_folder(model: str) -> None:
    path = Path(model) / "config.json"
    if not path.is_file():
        raise ValueError(f"model must be a folder that holds config.json, or tiny:FAMILY, got {model!r}")
    try:
        shape = json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"model must be a folder whose config.json is JSON, got {model!r}: {error}") from error
    if not isinstance(shape, dict):
        raise ValueError(f"model must be a folder whose config.json is an object, got {model!r} with {shape!r:.80}")
    for key, what in NOT_TRAINED.items():
        if key in shape:
            raise ValueError(f"model must be of text alone ({what}: not built yet), got {key} in {model!r}")
