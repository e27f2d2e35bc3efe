"""The benchmark of the switch: under torchrun, one engine on each rank, asleep and awake again at each depth."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from colo.commands.bench import SwitchOptions, read_switch_options
from colo.commands.bench_model import benchmark, device_name, engine_for, random_shards, versions
from colo.commands.switched import PARTS, SwitchBench
from colo.engine.engine import Engine
from colo.policy.shard import stand_ins
from colo.ranks import Ranks, stop_ranks
from colo.start import or_refused

GIB = 1 << 30
KV_BYTES = {"cuda": 8 << 30, "cpu": 64 << 20}


def main(arguments: Sequence[str]) -> None:
    """Measure and print. Collective; under torchrun.

    Raises:
        RuntimeError: greedy tokens are others after the cycles of a depth than before: on every rank, after the table.
    """
    with benchmark(arguments, read_switch_options) as (ranks, options, folder):
        dtype = getattr(torch, options.policy_dtype)
        kv_bytes = options.kv_bytes or KV_BYTES[ranks.device.type]
        engine = Engine(engine_for(options, folder, kv_bytes), ranks, folder, stand_ins(folder, dtype))
        or_refused(engine.require_reloadable, ranks)
        bench = SwitchBench(engine, getattr(torch, options.dtype), random_shards(folder, dtype, ranks), ranks)
        for depth in options.depths:
            bench.measure(depth, options.idle_s, options.num_cycles)
        report = {
            "command": shlex.join(["colo", "bench", "switch", *arguments]),
            **_header(options, ranks),
            "kv_gib": kv_bytes / GIB,
            **bench.numbers(options.step_s),
        }
        if ranks.is_main:
            _write_report(report, options.json_file)
        engine.close()
    stop_ranks()
    if report["changed_by"]:
        raise RuntimeError(f"greedy tokens are others after sleeping at depth {', '.join(report['changed_by'])}")


def _header(options: SwitchOptions, ranks: Ranks) -> dict[str, Any]:
    return {
        "model": options.model or options.shape,
        "policy_dtype": options.policy_dtype,
        "dtype": options.dtype,
        "num_ranks": ranks.world_size,
        "num_cycles": options.num_cycles,
        "device": device_name(ranks.device),
        "versions": versions(),
    }


def _write_report(report: dict[str, Any], json_file: Path | None) -> None:
    """Print, and write the JSON."""
    told = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts = "".join(f"{word:>14}" for word in PARTS.values())
    lines = [
        f"{report['model']}, {report['num_ranks']} ranks: {report['policy_dtype']} into {report['dtype']}, "
        f"weights of {report['weights_bytes'] / GIB:.3g} GiB, KV cache of {report['kv_gib']:.3g} GiB",
        f"{report['device']}; {told}",
        f"medians of {report['num_cycles']} cycles, in ms",
        "",
        f"{'depth':<7}{'idle s':>7}  {'weights by':<14}{parts}{'sum':>12}{'of a step':>11}",
        *map(_line, report["rows"]),
        "",
        f"{'depth':<7}{'awake GiB':>12}{'asleep GiB':>12}{'freed GiB':>12}",
    ]
    lines += [
        f"{one['depth']:<7}" + "".join(f"{one[f'{name}_bytes'] / GIB:>12.3f}" for name in ("awake", "asleep", "freed"))
        for one in report["memory"]
    ]
    verdict = f"NOT EQUAL after depth {', '.join(report['changed_by'])}" if report["changed_by"] else "equal"
    sys.stdout.write("\n".join([*lines, "", f"greedy tokens after each depth, to those before: {verdict}", ""]))
    if json_file:
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    medians, share = row["median_ms"], row["share_of_step"]
    parts = "".join(f"{medians[part]:>14.3f}" if part in medians else f"{'-':>14}" for part in PARTS)
    told = f"{share:.2%}" if share is not None else "-"
    return f"{row['depth']:<7}{row['idle_s']:>7g}  {row['way']:<14}{parts}{row['sum_ms']:>12.3f}{told:>11}"


if __name__ == "__main__":
    main(sys.argv[1:])
