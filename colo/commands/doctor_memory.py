"""What colo doctor finds by the memory plan: each card, the host's memory, and shared memory."""

import shutil
from pathlib import Path

from colo.commands import doctor_host as host
from colo.commands.doctor_cards import holders_of
from colo.commands.doctor_checks import Card, Cards, Finding, note, wrong
from colo.config import Config
from colo.engine.planned_kv import plannable_shape
from colo.memory_plan import Plan, make_plan
from colo.model_shape import draft_shape
from colo.start import read_shape, shard_bytes

ON_CARD_ALONE = ("cuda_graphs", "engine_buffers", "context", "communication")
"""Parts of the plan that a rank on CPU has nothing of."""
PROCESS_BYTES = 700 << 20
"""Python, torch and vLLM in a rank on CPU, before it holds anything."""


def memory(config: Config, folder: Path, num_held_out: int, cards: Cards, num_ranks: int) -> list[Finding]:
    """The recipe's plan against what is free.

    Args:
        config: The run's.
        folder: The model's.
        num_held_out: Held-out prompts.
        cards: The host's; without any the ranks are on CPU.
        num_ranks: On this host.
    """
    on_gpu, used = bool(cards.cards), cards.cards[:num_ranks]
    found, plan = _plan(config, folder, num_held_out, used, num_ranks)
    share = config.engine.vllm.get("gpu_memory_utilization")
    for number, card in enumerate(used):
        found.append(host.card_memory(number, card, plan, holders_of(card), share))
    if plan:
        found.append(host.host_memory(host_needs(plan, num_ranks, on_gpu=on_gpu), host.available_bytes()))
    free, transport = shutil.disk_usage("/dev/shm").free, config.reload.transport
    size = shard_bytes(config, folder)
    return [*found, host.shared_memory(free, size, transport, on_gpu=on_gpu, num_ranks=num_ranks)]


def _plan(
    config: Config, folder: Path, num_held_out: int, cards: tuple[Card, ...], num_ranks: int
) -> tuple[list[Finding], Plan | None]:
    """The plan in what is free of the smallest card, as a run makes it; without one, what is to be said about that."""
    try:
        shape = plannable_shape(config, lambda: read_shape(config, folder), on_cpu=not cards)
        draft = draft_shape(config.engine.speculative) if shape else None
    except ValueError as error:
        return [wrong("memory", str(error))], None
    if shape is None:
        return [
            note("memory", "config.json lacks a size, so nothing is planned; the recipe gives the KV cache's")
        ], None
    own = host.available_bytes() // num_ranks
    plan = make_plan(
        config,
        shape,
        num_ranks=num_ranks,
        card_bytes=min((host.usable_bytes(card) for card in cards), default=own),
        is_cpu=not cards,
        num_eval_prompts=num_held_out,
        draft=draft,
    )
    return [], plan


def host_needs(plan: Plan, num_ranks: int, *, on_gpu: bool) -> dict[str, int]:
    """Bytes of the host's memory that all ranks take, by what for: on CPU it is their device too."""
    if on_gpu:
        return {what: num_ranks * size for what, size in plan.host.items()}
    kept = {part: plan.generate[part] for part in ("engine_weights", *(("kv_cache",) if plan.depth == "none" else ()))}
    largest = max((plan.generate, plan.update | kept), key=lambda parts: sum(parts.values()))
    parts = {part: size for part, size in largest.items() if part not in ON_CARD_ALONE}
    return {what: num_ranks * size for what, size in {"processes": PROCESS_BYTES, **parts}.items()}
