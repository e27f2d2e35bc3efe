"""Which one or two settings would make a plan fit."""

import dataclasses
from collections.abc import Callable
from itertools import combinations
from typing import Any

from colo.config import Config
from colo.memory_plan import DEPTHS, GIB, MIB, Plan

PLAN_ERROR = 1.3
"""A plan that is larger than the card by this factor is refused; below it, the plan may be wrong."""
MOST_RANKS = 64
"""Times the present number that is tried."""
SMALL_CHUNK_TOKENS = 256
Replan = Callable[[Config, int], Plan]
"""The plan of another recipe on another number of ranks."""
Setting = tuple[str, Any]


def advice(config: Config, num_ranks: int, replan: Replan) -> list[Setting]:
    """The settings, as (option, value), that make a plan which does not fit fit; empty where none is known.

    One setting is tried before two, those that change no result before those that do, and more ranks last, under the
    name `--ranks`.
    """
    plan = replan(config, num_ranks)
    settings = (_for_update(config) if not plan.fits(DEPTHS[0]) else []) + (
        _for_generation(config, num_ranks, plan) if not plan.generates else []
    )
    for number in (1, 2):
        for chosen in combinations(settings, number):
            if len(dict(chosen)) == number and replan(_with(config, chosen), num_ranks).is_possible:
                return list(chosen)
    factor = 2
    while factor <= MOST_RANKS:
        if replan(config, factor * num_ranks).is_possible:
            return [("--ranks", factor * num_ranks)]
        for setting in settings:
            if replan(_with(config, (setting,)), factor * num_ranks).is_possible:
                return [("--ranks", factor * num_ranks), setting]
        factor *= 2
    return []


def told(settings: list[Setting]) -> str:
    """The settings as one types them."""
    if not settings:
        return "no setting is known that makes it fit: take a smaller model or a larger card"
    return " ".join(f"{option}{' ' if option.startswith('--') else '='}{_typed(value)}" for option, value in settings)


def refuse_too_large(config: Config, num_ranks: int, replan: Replan) -> None:
    """Refuse what cannot be trained on these cards by far, before anything is built.

    Raises:
        ValueError: the update is planned to take over `PLAN_ERROR` of the card at the deepest sleep; by option.
    """
    plan = replan(config, num_ranks)
    planned, card = plan.update_bytes(DEPTHS[0]), plan.card_bytes
    if planned <= PLAN_ERROR * card:
        return
    settings = advice(config, num_ranks, replan)
    because = f"an update is planned to take {planned / GIB:.1f} GiB of a card of {card / GIB:.1f}, see colo plan"
    if not settings:
        raise ValueError(f"model must be smaller ({because}), got {config.model!r}")
    option, value = settings[0]
    got = num_ranks if option == "--ranks" else _value(config, option)
    more = f"; with it {told(settings[1:])}" if settings[1:] else ""
    raise ValueError(f"{option} must be {_typed(value)} ({because}{more}), got {got!r}")


def _for_update(config: Config) -> list[Setting]:
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    settings: list[Setting] = []
    if not config.policy.gradient_checkpointing:
        settings.append(("policy.gradient_checkpointing", True))
    tokens = config.batch.max_tokens // 2
    while tokens >= longest:
        settings.append(("batch.max_tokens", tokens))
        tokens //= 2
    if config.policy.logprob_chunk_tokens > SMALL_CHUNK_TOKENS:
        settings.append(("policy.logprob_chunk_tokens", SMALL_CHUNK_TOKENS))
    return settings + _narrower(config)


def _for_generation(config: Config, num_ranks: int, plan: Plan) -> list[Setting]:
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
    size = 2 * config.engine.tensor_parallel_size
    if num_ranks % size == 0:
        settings.append(("engine.tensor_parallel_size", size))
    return settings + _narrower(config)


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
    return getattr(getattr(config, section), name)
