"""The benchmark of the reload: under torchrun, one engine on each rank, and every way timed on the same tensors."""

import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from colo.commands.bench import ReloadOptions, read_reload_options
from colo.commands.bench_model import benchmark, device_name, engine_for, random_shards, versions
from colo.commands.timed import Clock, Row
from colo.engine.ways import ReloadWays
from colo.policy.shard import stand_ins
from colo.ranks import Ranks, stop_ranks

KV_BYTES = 256 << 20
SLOW_REPEATS = 5
"""At most so many runs of the ways that take a call of vLLM's loader."""


def main(arguments: Sequence[str]) -> None:
    """Measure and print. Collective; under torchrun.

    Raises:
        RuntimeError: a replay leaves the engine other than vLLM's loader does: on every rank, after the table.
    """
    with benchmark(arguments, read_reload_options) as (ranks, options, folder):
        dtype = getattr(torch, options.policy_dtype)
        ways = ReloadWays(engine_for(options, folder, KV_BYTES), ranks, folder, stand_ins(folder, dtype))
        ways.bind(random_shards(folder, dtype, ranks))
        report, wrong = _report(ways, options, ranks, ["colo", "bench", "reload", *arguments])
        if ranks.is_main:
            _write_report(report, options.json_file)
        ways.close()
    stop_ranks()
    if wrong:
        raise RuntimeError(f"a replay leaves the engine other than vLLM's load_weights does: {', '.join(wrong)}")


def _report(
    ways: ReloadWays, options: ReloadOptions, ranks: Ranks, command: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Everything that was measured, and the engine's tensors that came out wrong. Collective."""
    sizes = ways.describe()
    read, written, held = (int(sizes[name]) for name in ("read_bytes", "written_bytes", "held_bytes"))
    clock, repeats, few = Clock(ranks, ways.synchronize), options.num_repeats, min(SLOW_REPEATS, options.num_repeats)
    moved = read + written
    limit = _measure_limit(clock, moved, repeats, ranks)
    replay = clock.measure(Row(name="plan replay", bytes=moved), ways.replay, repeats, on_device=True)
    rows = [limit, replay]
    for name, size, run, runs in (
        ("proof: the policy's side", read, ways.sum_policy, repeats),
        ("proof: the engine's side", held, ways.sum_engine, repeats),
        ("proof: both", read + held, ways.sum_both, repeats),
        ("whole reload, with proof", moved, ways.reload, repeats),
        ("load_weights, one call", moved, ways.load_weights, few),
        ("load_weights, one call a tensor", moved, ways.load_weights_one_by_one, few),
    ):
        rows.append(clock.measure(Row(name=name, bytes=size), run, runs))
    extra = _peak_bytes(ways, ranks)
    wrong = [] if ways.hindrance else ways.differing()
    rows.append(clock.measure(Row(name="vLLM's reload_weights", bytes=moved), ways.reload_weights, few))
    return {
        "command": shlex.join(command),
        "model": options.model or options.shape,
        "policy_dtype": options.policy_dtype,
        "dtype": options.dtype,
        "num_ranks": ranks.world_size,
        "device": device_name(ranks.device),
        "versions": versions(),
        **sizes,
        "reload_extra_bytes": extra,
        "hindrance": ways.hindrance,
        "is_equal": None if ways.hindrance else not wrong,
        "differing": wrong,
        "rows": [row.numbers(limit, replay) for row in rows],
    }, wrong


def _measure_limit(clock: Clock, num_bytes: int, repeats: int, ranks: Ranks) -> Row:
    """One copy that reads and writes so many bytes together; its memory is given back."""
    pair = [torch.zeros(num_bytes // 2, dtype=torch.uint8, device=ranks.device) for _ in range(2)]
    row = Row(name="copy limit", bytes=2 * pair[0].numel())
    clock.measure(row, lambda: pair[0].copy_(pair[1]), repeats, on_device=True)
    pair.clear()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def _peak_bytes(ways: ReloadWays, ranks: Ranks) -> int:
    """What one more reload allocates at its peak, on the rank with the most: as measured on CUDA, as told on CPU."""
    on_cuda = ranks.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_cuda else 0
    told = ways.reload()["reload/extra_bytes"]
    extra = torch.cuda.max_memory_allocated() - before if on_cuda else told
    return int(ranks.max(extra, "measuring a reload's memory"))


def _write_report(report: dict[str, Any], json_file: Path | None) -> None:
    """Print, and write the JSON."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    mib = {name: report[f"{name}_bytes"] / 2**20 for name in ("read", "written", "reload_extra")}
    lines = [
        f"{report['model']}, {report['num_ranks']} ranks: {report['policy_dtype']} into {report['dtype']}",
        f"{report['device']}; {versions}",
        f"{mib['read']:.1f} MiB read, {mib['written']:.1f} MiB written by each rank's reload: {report['num_slices']} "
        f"slices of {report['num_tensors']} tensors, {report['num_constants']} constants; {report['num_kept']} kept",
        f"{report['how_ranks_are_read']}; a reload allocates {mib['reload_extra']:.1f} MiB",
        "",
        f"{'what':<32}{'median ms':>11}{'worst ms':>11}{'device ms':>11}{'GB/s':>9}{'of limit':>10}{'x replay':>10}",
    ]
    lines += [_line(row) for row in report["rows"]]
    verdict = {
        True: "equal: a replay leaves the engine bit for bit as load_weights does",
        False: f"NOT EQUAL: {', '.join(report['differing'])}",
        None: f"not compared: {report['hindrance']}",
    }[report["is_equal"]]
    sys.stdout.write("\n".join([*lines, "", verdict, ""]))
    if json_file:
        json_file.write_text(json.dumps(report, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['name']:<32}  failed: {row['failed']}"
    device = f"{statistics.median(row['device_ms']):.3f}" if row["device_ms"] else "-"
    times = f"{row['times_replay']:.3g}" if row["times_replay"] else "-"
    return (
        f"{row['name']:<32}{row['median_ms']:>11.3f}{row['worst_ms']:>11.3f}{device:>11}{row['gb_per_s']:>9.3g}"
        f"{row['share_of_limit']:>10.3g}{times:>10}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
