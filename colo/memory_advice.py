"""Which one or two settings would make a plan fit."""

import dataclasses
from collections.abc import Callable
from itertools import combinations
from typing import Any

from colo.config import Config
from colo.memory_plan import DEPTHS, GIB, MIB, Plan, make_plan, recipe_depth
from colo.model_shape import ModelShape

PLAN_ERROR = 1.3
"""A plan that is larger than the card by this factor is refused; below it, the plan may be wrong."""
MOST_RANKS = 64
"""Times the present number that is tried."""
SMALL_CHUNK_TOKENS = 256
Replan = Callable[[Config, int], Plan]
"""The plan of another recipe on another number of ranks."""
Setting = tuple[str, Any]


def advice(config: Config, shape: ModelShape, num_ranks: int, replan: Replan) -> list[Setting]:
    """The settings, as (option, value), that make a plan which does not fit fit; empty where none is known.

    One setting is tried before two, those that change no result before those that do, and more ranks last, under the
    name `--ranks`. What `colo.config.check_config` or vLLM would refuse is not among them.
    """
    plan = replan(config, num_ranks)
    settings = (_for_update(config) if not plan.fits(plan.depth) else []) + (
        _for_generation(config, plan) if not plan.generates else []
    )

    def is_possible(chosen: tuple[Setting, ...], number: int) -> bool:
        other = _with(config, chosen)
        return _is_accepted(other, shape, number) and replan(other, number).is_possible

    for number in (1, 2):
        for chosen in combinations(settings, number):
            if len(dict(chosen)) == number and is_possible(chosen, num_ranks):
                return list(chosen)
    for number in range(num_ranks + 1, MOST_RANKS * num_ranks + 1):
        for chosen in ((), *((setting,) for setting in settings)):
            if is_possible(chosen, number):
                return [("--ranks", number), *chosen]
    return []


def told(settings: list[Setting]) -> str:
    """The settings as one types them."""
    if not settings:
        return "no setting is known that makes it fit: take a smaller model or a larger card"
    return " ".join(f"{option}{' ' if option.startswith('--') else '='}{_typed(value)}" for option, value in settings)


def refuse_too_large(config: Config, shape: ModelShape, num_ranks: int, card_bytes: int) -> None:
    """Refuse what cannot be trained on these cards by far, before anything is built.

    Raises:
        ValueError: the update is planned to take over `PLAN_ERROR` of the card at the recipe's depth of sleep; the
            message names an option.
    """

    def replan(other: Config, number: int) -> Plan:
        return make_plan(other, shape, num_ranks=number, card_bytes=card_bytes)

    plan = replan(config, num_ranks)
    planned, card = plan.update_bytes(plan.depth), plan.card_bytes
    if planned <= PLAN_ERROR * card:
        return
    settings = advice(config, shape, num_ranks, replan)
    because = f"an update is planned to take {planned / GIB:.1f} GiB of a card of {card / GIB:.1f}, see colo plan"
    if not settings:
        raise ValueError(f"model must be smaller ({because}), got {config.model!r}")
    option, value = settings[0]
    got = num_ranks if option == "--ranks" else _value(config, option)
    more = f"; with it {told(settings[1:])}" if settings[1:] else ""
    raise ValueError(f"{option} must be {_typed(value)} ({because}{more}), got {got!r}")


def _for_update(config: Config) -> list[Setting]:
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    deeper = reversed(DEPTHS[: DEPTHS.index(recipe_depth(config))])
    settings: list[Setting] = [("engine.sleep", depth) for depth in deeper]
    if not config.policy.gradient_checkpointing:
        settings.append(("policy.gradient_checkpointing", True))
    tokens = config.batch.max_tokens // 2
    while tokens >= longest:
        settings.append(("batch.max_tokens", tokens))
        tokens //= 2
    if config.policy.logprob_chunk_tokens > SMALL_CHUNK_TOKENS:
        settings.append(("policy.logprob_chunk_tokens", SMALL_CHUNK_TOKENS))
    return settings + _narrower(config)


def _for_generation(config: Config, plan: Plan) -> list[Setting]:
    """Another KV cache where the recipe gives its size and one would fit; then what makes room for it."""
    kv, options = plan.kv, config.engine.vllm
    settings: list[Setting] = []
    fitting = min(kv.needed, kv.room)
    if kv.given is not None and fitting >= kv.least:
        if options.get("kv_cache_memory_bytes") is not None:
            settings.append(("engine.vllm.kv_cache_memory_bytes", fitting // MIB * MIB))
        elif "gpu_memory_utilization" in options:
            engine = plan.generate["engine_weights"] + plan.generate["activations"]
            settings.append(("engine.vllm.gpu_memory_utilization", (fitting + engine) * 100 // plan.card_bytes / 100))
    deeper = {"none": ["optimizer", "all"], "optimizer": ["all"]}
    settings += [("policy.offload", value) for value in deeper.get(config.policy.offload, [])]
    if "draft_tensor_parallel_size" not in config.engine.speculative:  # it must be the same
        settings.append(("engine.tensor_parallel_size", 2 * config.engine.tensor_parallel_size))
    return settings + _narrower(config)


def _is_accepted(config: Config, shape: ModelShape, num_ranks: int) -> bool:
    """Whether so many ranks can be dealt the recipe: by `check_config`, and by vLLM for the heads."""
    size, rollout = config.engine.tensor_parallel_size, config.rollout
    if num_ranks % size or not shape.splits_into(size):
        return False
    replicas = num_ranks // size
    return rollout.num_prompts % replicas == 0 and rollout.carry_over_extra % replicas == 0


def _narrower(config: Config) -> list[Setting]:
    return [("policy.dtype", "bfloat16")] if config.policy.dtype == "float32" else []


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with(config: Config, settings: tuple[Setting, ...]) -> Config:
    for option, value in settings:
        section, name = option.split(".", 1)
        if name.startswith("vllm."):
            name, value = "vllm", config.engine.vllm | {name.removeprefix("vllm."): value}
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def _value(config: Config, option: str) -> Any:
    section, name = option.split(".", 1)
    if name.startswith("vllm."):
        return config.engine.vllm[name.removeprefix("vllm.")]
    return getattr(getattr(config, section), name)
