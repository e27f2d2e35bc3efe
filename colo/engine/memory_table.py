"""The ledger's words: its parts and phases, the table, and what to change where memory ran out. Pure: no device."""

from collections.abc import Mapping
from typing import Any

from colo.config import Config

GIB = 1 << 30
PREFIX = "memory_gib"
PHASES = ("build", "wake", "reload", "generate", "asleep", "update")
"""In the order of a step; `update` is the peak of it."""
PARTS = (
    "engine_weights",
    "kv_cache",
    "cuda_graphs",
    "engine_buffers",
    "policy_parameters",
    "gradients",
    "optimizer",
    "activations",
    "context",
    "communication",
    "torch_cache",
    "other_processes",
    "unattributed",
)
"""They sum to the total; `unattributed` is what the others leave of it, negative where they are taken too large."""
TOTAL = "total"
POLICY_PARTS = ("policy_parameters", "gradients", "optimizer")
MIN_GAIN = 0.02
"""Of what is held: a setting that frees less is not offered."""
MAX_OFFERED = 2
RECOMPUTED = 0.6
"""Of the activations that gradient checkpointing saves, at least, in a model of a dozen layers or more."""

Readings = Mapping[str, Mapping[str, float]]
"""{phase: {part: GiB}}, with the total among the parts."""


def closed(total: int, parts: Mapping[str, int]) -> dict[str, int]:
    """All of `PARTS`, those that are not given as 0, then the total: they sum to it exactly.

    Args:
        total: Measured, in bytes.
        parts: Some of them but `unattributed`, in bytes.
    """
    whole = dict.fromkeys(PARTS, 0) | dict(parts)
    assert list(whole) == list(PARTS), f"the ledger has no part {sorted(set(whole) - set(PARTS))}"
    return whole | {"unattributed": total - sum(parts.values()), TOTAL: total}


def in_gib(sizes: Mapping[str, int]) -> dict[str, float]:
    """Bytes as GiB, by the same names."""
    return {name: size / GIB for name, size in sizes.items()}


def as_metrics(readings: Readings) -> dict[str, float]:
    """The readings under their metric names."""
    return {f"{PREFIX}/{phase}/{part}": gib for phase, parts in readings.items() for part, gib in parts.items()}


def readings_in(metrics: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The readings among a step's metrics; phases in their order, empty where there are none."""
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        prefix, _, rest = name.partition("/")
        phase, _, part = rest.partition("/")
        if prefix == PREFIX and phase in PHASES:
            found.setdefault(phase, {})[part] = value
    return {phase: found[phase] for phase in PHASES if phase in found}


def table(readings: Readings) -> str:
    """Who holds how much: a row per part, a column per phase, in GiB; one line per row, without a last newline."""
    phases = [phase for phase in PHASES if phase in readings]
    width = max(len(part) for part in PARTS)
    lines = ["  ".join([f"{'GiB':<{width}}", *(f"{phase:>8}" for phase in phases)])]
    for part in (*PARTS, TOTAL):
        cells = [f"{readings[phase].get(part, 0.0):8.2f}" for phase in phases]
        lines.append("  ".join([f"{part:<{width}}", *cells]))
    return "\n".join(lines)


def advice(parts: Mapping[str, float], config: Config, where: str, *, kv_gib: float = 0.0) -> list[str]:
    """The one or two changes that free most of what ran out, largest first; each names its setting.

    Args:
        parts: What was held then, in GiB; in the update, at its peak.
        config: The run's.
        where: "update", or the wake ("wake_up").
        kv_gib: The engine's whole KV cache, of which only a part is mapped where memory ran out in between.
    """
    offers = _for_update(parts, config) if where == "update" else _for_wake(parts, config, kv_gib)
    others = parts["other_processes"]
    offers.append((others, f"end the other processes on this device: they hold {others:.2f} GiB"))
    held = sum(parts[part] for part in PARTS)
    worth = sorted((offer for offer in offers if offer[0] >= MIN_GAIN * held), key=lambda offer: -offer[0])
    if not worth:
        return ["more ranks: each then holds a smaller share of the policy"]
    return [text for _, text in worth[:MAX_OFFERED]]


def _for_update(parts: Mapping[str, float], config: Config) -> list[tuple[float, str]]:
    """(GiB that it frees, what to change). Offloading the optimizer is none: it is back for the optimizer step."""
    offers = []
    mapped = parts["engine_weights"] + parts["kv_cache"]
    if config.engine.sleep != "2":
        offers.append((mapped, f"engine.sleep=2: the engine keeps {mapped:.2f} GiB of weights and KV cache mapped"))
    activations = parts["activations"]
    if not config.policy.gradient_checkpointing:
        gain = RECOMPUTED * activations
        text = f"policy.gradient_checkpointing=true: the activations are {activations:.2f} GiB"
        offers.append((gain, text))
    rollout, max_tokens = config.rollout, config.batch.max_tokens
    # A sequence is never cut, so that the longest is the least that a micro-batch takes.
    half = max(max_tokens // 2, rollout.max_prompt_tokens + rollout.max_new_tokens)
    if half < max_tokens:
        text = f"batch.max_tokens={half}: the activations of {max_tokens} tokens are {activations:.2f} GiB"
        offers.append((activations * (1 - half / max_tokens), text))
    if config.policy.dtype == "float32":
        held = sum(parts[part] for part in POLICY_PARTS)
        text = f"policy.dtype=bfloat16, or more ranks: the policy, its gradients and optimizer are {held:.2f} GiB"
        offers.append((held / 2, text))
    return offers


def _for_wake(parts: Mapping[str, float], config: Config, kv_gib: float) -> list[tuple[float, str]]:
    """(GiB that it frees, what to change). What the policy holds then has no use until its next update."""
    optimizer, parameters, offers = parts["optimizer"], parts["policy_parameters"], []
    if config.policy.offload == "none" and optimizer:
        offers.append((optimizer, f"policy.offload=optimizer: the optimizer's state is {optimizer:.2f} GiB"))
    elif config.policy.offload != "all":
        offers.append((parameters, f"policy.offload=all: the policy's parameters are {parameters:.2f} GiB"))
    mapped = parts["kv_cache"]
    wanted = max(kv_gib, mapped)
    fits = 0.9 * mapped if mapped else wanted / 2
    text = f"engine.vllm.kv_cache_memory_bytes={int(fits * GIB)}: the KV cache is {wanted:.2f} GiB"
    offers.append((wanted - fits, text))
    graphs = parts["cuda_graphs"]
    if not config.engine.vllm.get("enforce_eager", False):
        offers.append((graphs, f"engine.vllm.enforce_eager=true: the CUDA graphs hold {graphs:.2f} GiB"))
    return offers
