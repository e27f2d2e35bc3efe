"""colo plan: what memory a recipe will take on each rank, without a GPU and without vLLM."""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colo.commands.arguments import Parser, whole_number
from colo.commands.launch import check_ranks, count_gpus
from colo.config import TINY, Config, check_config
from colo.recipe import load_config

if TYPE_CHECKING:
    from colo.memory_advice import Setting
    from colo.memory_plan import Plan

GIB = 1 << 30


def plan_command(arguments: list[str]) -> None:
    """Print the plan's tables; exit status 1 where the recipe does not fit.

    Raises:
        ValueError: the recipe, an override or an option is wrong, or there is no card and --card does not name one.
    """
    parser = _parser()
    if {"-h", "--help"} & set(arguments):
        parser.print_help()
        return
    given, rest = parser.parse_known_args(arguments)
    config = load_config(rest)
    num_gpus = count_gpus()
    num_ranks = whole_number("--ranks", given.ranks) if given.ranks else num_gpus or 1
    if not given.card:
        check_ranks(num_ranks, num_gpus)
    check_config(config, num_ranks)
    plan, settings = planned(config, num_ranks, _card_bytes(given.card, num_gpus))
    sys.stdout.write(table(plan, config, num_ranks) + verdict(plan, settings))
    if given.json:
        Path(given.json).write_text(json.dumps(as_json(plan, settings, num_ranks), indent=1) + "\n")
    if not plan.is_possible:
        sys.exit(1)


def planned(config: Config, num_ranks: int, card_bytes: int) -> "tuple[Plan, list[Setting]]":
    """The plan of a recipe, and the settings that would make it fit where it does not.

    Raises:
        ValueError: the model's config.json lacks a size, or transformers does not know the model.
    """
    from colo.engine.planned_kv import num_eval_prompts  # noqa: PLC0415 - torch takes seconds to import
    from colo.memory_advice import advice  # noqa: PLC0415 - as above
    from colo.memory_plan import make_plan  # noqa: PLC0415 - as above
    from colo.model_shape import draft_shape  # noqa: PLC0415 - as above
    from colo.policy.tiny import make_tiny_model  # noqa: PLC0415 - as above
    from colo.start import read_shape  # noqa: PLC0415 - as above

    if config.model.startswith(TINY):
        with tempfile.TemporaryDirectory() as folder:  # not in run_dir: a plan leaves nothing behind
            make_tiny_model(config.model.removeprefix(TINY), Path(folder), seed=config.seed)
            shape = read_shape(config, Path(folder))
    else:
        shape = read_shape(config, Path(config.model))
    draft = draft_shape(config.engine.speculative)
    num_evaluated = num_eval_prompts(config, is_training=True)

    def replan(other: Config, number: int) -> "Plan":
        return make_plan(
            other,
            shape,
            num_ranks=number,
            card_bytes=card_bytes,
            num_eval_prompts=num_evaluated,
            draft=draft,
        )

    plan = replan(config, num_ranks)
    return plan, [] if plan.is_possible else advice(config, shape, num_ranks, replan)


def table(plan: "Plan", config: Config, num_ranks: int) -> str:
    """Both phases by part, the depths of sleep, the KV cache and the host memory, for a person to read."""
    from colo.memory_plan import DEPTHS, LABELS  # noqa: PLC0415 - as above

    lines = [
        f"{num_ranks} rank{'s' * (num_ranks > 1)}, each with a card of {_gib(plan.card_bytes)} GiB; GiB a rank",
        "",
    ]
    lines.append(f"{'':<22}{'generate':>10}{'update':>10}")
    for part, label in LABELS.items():
        lines.append(f"{label:<22}{_gib(plan.generate[part]):>10}{_gib(plan.update[part]):>10}")
    totals = sum(plan.generate.values()), sum(plan.update.values())
    lines.append(f"{'total':<22}{_gib(totals[0]):>10}{_gib(totals[1]):>10}")
    lines.append(
        f"{'left of the card':<22}{_gib(plan.card_bytes - totals[0]):>10}{_gib(plan.card_bytes - totals[1]):>10}"
    )
    lines.append(f"{'at the wake':<22}{_gib(plan.wake_bytes):>10}")
    lines += ["", f"depth of sleep, with engine.sleep_margin_gib {plan.margin_bytes / GIB:g}"]
    for depth in DEPTHS:
        fits = "fits" if plan.fits(depth) else "does not fit"
        lines.append(f"  {depth:<5}{_gib(plan.update_bytes(depth)):>9}  {fits}")
    lines.append(f"engine.sleep=auto will come to {plan.auto_depth}; the recipe has {config.engine.sleep}")
    return "\n".join([*lines, "", *_kv_lines(plan), *_host_lines(plan)]) + "\n"


def _kv_lines(plan: "Plan") -> list[str]:
    kv = plan.kv
    origin = "by the recipe" if kv.given is not None else "planned"
    lines = [
        f"KV cache: {kv.bytes} bytes, {origin}; {kv.bytes_per_token} a token; holds {kv.num_sequences} sequences of "
        f"{kv.sequence_tokens} tokens",
        f"  needed for all {kv.num_running} that run at once: {_gib(kv.needed)} GiB; there is room for "
        f"{_gib(max(0, kv.room))}",
    ]
    if kv.bytes < kv.needed:
        lines.append("  what does not fit waits, or is preempted and computed again: slower, and the same tokens")
    return lines


def _host_lines(plan: "Plan") -> list[str]:
    held = {what: number for what, number in plan.host.items() if number}
    return [f"host memory of a rank: {_gib(number)} GiB ({what})" for what, number in held.items()]


def verdict(plan: "Plan", settings: "list[Setting]") -> str:
    """One or two lines: whether it fits, and what would make it fit."""
    from colo.memory_advice import told  # noqa: PLC0415 - as above

    if plan.is_possible:
        return "fits\n"
    phases = [] if plan.generates else ["the engine beside the policy"]
    if not plan.fits(plan.depth):
        phases.append(f"the update, at {f'depth {plan.depth}' if plan.fits('2') else 'any depth'} of sleep")
    return f"does not fit: {' and '.join(phases)}\nwhat would make it fit: {told(settings)}\n"


def as_json(plan: "Plan", settings: "list[Setting]", num_ranks: int) -> dict[str, Any]:
    """Everything of the table, in bytes."""
    from colo.memory_plan import DEPTHS  # noqa: PLC0415 - as above

    kv = plan.kv
    return {
        "num_ranks": num_ranks,
        "card_bytes": plan.card_bytes,
        "margin_bytes": plan.margin_bytes,
        "generate": plan.generate | {"total": sum(plan.generate.values())},
        "update": plan.update | {"total": sum(plan.update.values())},
        "wake_bytes": plan.wake_bytes,
        "depths": {depth: {"bytes": plan.update_bytes(depth), "fits": plan.fits(depth)} for depth in DEPTHS},
        "depth": plan.depth,
        "auto_depth": plan.auto_depth,
        "kv": {
            "bytes": kv.bytes,
            "bytes_per_token": kv.bytes_per_token,
            "needed": kv.needed,
            "room": kv.room,
            "num_sequences": kv.num_sequences,
            "num_running": kv.num_running,
            "is_given": kv.given is not None,
        },
        "host": plan.host,
        "fits": plan.is_possible,
        "settings": dict(settings),
    }


def _card_bytes(given: str | None, num_gpus: int) -> int:
    if given:
        try:
            size = float(given)
        except ValueError:
            size = 0.0
        if not 0 < size < float("inf"):
            raise ValueError(f"--card must be a number of GiB above 0, got {given!r}")
        return int(size * GIB)
    if not num_gpus:
        raise ValueError("--card must be the card's memory in GiB on a host without a GPU (80, 140), got nothing")
    import torch  # noqa: PLC0415 - as above

    return min(torch.cuda.get_device_properties(number).total_memory for number in range(num_gpus))


def _gib(number: int) -> str:
    return f"{number / GIB:.2f}"


def _parser() -> argparse.ArgumentParser:
    description = "Plan a recipe's memory on each rank: both phases by part, and whether they fit a card."
    parser = Parser("colo plan", description)
    parser.usage = "colo plan --config-name RECIPE [option=value ...] [--ranks N] [--card GIB] [--json FILE]"
    parser.add_argument("--ranks", metavar="N", help="processes of all hosts (default: this host's GPUs; 1 without)")
    parser.add_argument("--card", metavar="GIB", help="memory of a card in GiB (default: this host's; needed without)")
    parser.add_argument("--json", metavar="FILE", help="write the plan there too, in bytes")
    return parser
