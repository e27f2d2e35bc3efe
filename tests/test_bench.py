"""colo bench: one run on CPU with the real vLLM, and what is refused before anything is built."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from colo.commands.bench import (
    DEPTHS,
    SHAPES,
    SWITCH,
    read_reload_options,
    read_switch_options,
    reload_command,
    switch_command,
)
from colo.commands.bench_model import CONFIGS, TINY_SHAPES
from colo.commands.switched import PARTS
from colo.commands.timed import Row
from tests.launch import ENVIRONMENT, ROOT

ROWS = [
    "copy limit",
    "plan replay",
    "proof: the policy's side",
    "proof: the engine's side",
    "proof: both",
    "whole reload, with proof",
    "load_weights, one call",
    "load_weights, one call a tensor",
    "vLLM's reload_weights",
]


def _bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "colo.cli", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def test_every_way_is_timed_and_a_replay_equals_load_weights(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    arguments = ("reload", "--shape", "tiny", "--repeats", "2", "--json", str(file))
    ran = _bench(*arguments)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(file.read_text())
    assert [row["name"] for row in told["rows"]] == ROWS
    for row in told["rows"]:
        assert any(line.startswith(row["name"]) for line in ran.stdout.splitlines()), ran.stdout
        assert len(row["ms"]) == 2
        for name in ("bytes", "median_ms", "worst_ms", "gb_per_s", "share_of_limit", "worst_share_of_limit"):
            assert row[name] > 0, (row["name"], name)
        assert row["worst_ms"] == max(row["ms"])
    by_name = {row["name"]: row for row in told["rows"]}
    assert by_name["copy limit"]["share_of_limit"] == by_name["plan replay"]["times_replay"] == 1
    assert told["is_equal"]
    assert told["differing"] == []
    assert told["read_bytes"] == 2 * (told["written_bytes"] - _constant_bytes(told)) > 0  # float32 into bfloat16
    assert by_name["copy limit"]["bytes"] in {told["read_bytes"] + told["written_bytes"] - odd for odd in (0, 1)}
    assert (told["num_slices"], told["num_tensors"], told["num_constants"]) == (24, 24, 1)
    assert told["command"] == f"colo bench {' '.join(arguments)}"
    assert {"python", "torch", "transformers"} < told["versions"].keys()
    assert told["how_ranks_are_read"] in ran.stdout
    assert "equal: a replay leaves the engine bit for bit as load_weights does" in ran.stdout


@pytest.mark.slow
def test_every_depth_is_timed_part_by_part_and_changes_no_token(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    arguments = ("switch", "--shape", "tiny", "--cycles", "2", "--idle", "0,0.1", "--step-s", "2", "--json", str(file))
    ran = _bench(*arguments)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(file.read_text())
    ways = [(0, "reload"), (0.1, "reload"), (0, "load_weights")]
    assert [(row["depth"], row["idle_s"], row["way"]) for row in told["rows"]] == [
        (depth, *way) for depth in DEPTHS for way in ways
    ]
    table = [line.split() for line in ran.stdout.splitlines()]
    for row in told["rows"]:
        assert row["ms"].keys() == PARTS.keys() - ({"prove"} if row["way"] == "load_weights" else set())
        for part, times in row["ms"].items():
            assert len(times) == 2
            assert row["median_ms"][part] == sum(times) / 2 > 0
        assert row["sum_ms"] == pytest.approx(sum(row["median_ms"].values()))
        assert row["share_of_step"] == pytest.approx(row["sum_ms"] / 2000)
        seen = [row["depth"], f"{row['idle_s']:g}", row["way"]]
        (line,) = [words for words in table if words[:3] == seen]
        assert line[-2:] == [f"{row['sum_ms']:.3f}", f"{row['share_of_step']:.2%}"]
    kv_bytes = told["kv_gib"] * 2**30
    assert kv_bytes == 64 << 20
    memory = {row["depth"]: row for row in told["memory"]}
    assert list(memory) == list(DEPTHS)
    assert memory["none"]["freed_bytes"] == pytest.approx(0, abs=0.1 * kv_bytes)
    for depth in ("kv", "1", "2"):
        assert memory[depth]["freed_bytes"] == pytest.approx(kv_bytes + told["weights_bytes"], rel=0.1)
        assert memory[depth]["freed_bytes"] == memory[depth]["awake_bytes"] - memory[depth]["asleep_bytes"]
    assert told["changed_by"] == []
    assert "greedy tokens after each depth, to those before: equal" in ran.stdout
    assert told["command"] == f"colo bench {' '.join(arguments)}"


def test_a_step_is_the_median_of_a_run_from_its_second_step_on(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}, "time_s/step": {s}}}\n' for step, s in enumerate([90, 2, 8, 3])))
    options = read_switch_options(["--shape", "tiny", "--run", str(tmp_path), "--depths", "2,kv,2", "--kv-gib", "0.5"])
    assert options.step_s == 3
    assert (options.depths, options.idle_s, options.num_cycles, options.kv_bytes) == (["2", "kv"], [0, 1], 5, 1 << 29)
    metrics.write_text('{"step": 0, "time_s/step": 90}\n{"step": 1, "time_s')
    with pytest.raises(ValueError, match=r"^--run must be a run of at least two steps, got "):
        read_switch_options(["--shape", "tiny", "--run", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--depths", "2,3"], "--depths must be one of none, kv, 1, 2, got '3'"),
        (["--depths", "auto"], "--depths must be one of none, kv, 1, 2, got 'auto'"),
        (["--idle", "0,-1"], "--idle must be a number of at least 0, got '-1'"),
        (["--cycles", "0"], "--cycles must be a whole number of at least 1, got '0'"),
        (["--kv-gib", "0"], "--kv-gib must be a number above 0, got '0'"),
        (["--step-s", "nan"], "--step-s must be a number above 0, got 'nan'"),
        (["--step-s", "1", "--run", "x"], "--step-s or --run may be given, and not both, got '1' and 'x'"),
        (["--run", "/no"], "--run must be a run_dir that holds metrics.jsonl, got '/no'"),
        (["--repeats", "2"], "bench switch: unrecognized arguments: --repeats 2"),
    ],
)
def test_a_wrong_option_of_the_switch_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared below
        read_switch_options(["--shape", "tiny", *arguments])
    assert str(refused.value) == message


def _constant_bytes(told: dict[str, Any]) -> int:
    """The padding of the tiny model's 258 words to 320, in bfloat16."""
    assert told["dtype"] == "bfloat16"
    return (320 - 258) * 64 * 2


def test_a_row_compares_rates_by_one_clock() -> None:
    limit = Row(name="limit", bytes=1000, ms=[2.0, 4.0, 3.0], device_ms=[1.0, 1.0, 1.0])
    row = Row(name="row", bytes=500, ms=[3.0, 3.0, 12.0], device_ms=[0.5, 1.0, 2.0])
    assert row.share_of(limit) == 0.5
    assert row.numbers(limit, row)["worst_share_of_limit"] == 0.25
    assert row.numbers(limit, limit)["times_replay"] == 1
    slow = Row(name="slow", bytes=1000, ms=[30.0])
    assert slow.share_of(limit) == pytest.approx(0.1)
    assert slow.numbers(limit, row)["times_replay"] == 10
    failed = Row(name="failed", bytes=1, failed="RuntimeError: no")
    assert failed.numbers(limit, row) == {"name": "failed", "failed": "RuntimeError: no"}
    assert slow.numbers(limit, failed)["times_replay"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model or --shape must be given, and not both, got '' and ''"),
        (["--shape", "tiny", "--model", "x"], "--model or --shape must be given, and not both, got 'x' and 'tiny'"),
        (["--model", "/nowhere"], "--model must be a folder that holds config.json, got '/nowhere'"),
        (["--shape", "huge"], f"--shape must be one of {', '.join(SHAPES)}, got 'huge'"),
        (["--shape", "tiny", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, got 'int8'"),
        (["--shape=tiny", "--policy-dtype=half"], "--policy-dtype must be one of float32, bfloat16, got 'half'"),
        (["--shape", "tiny", "--repeats", "0"], "--repeats must be a whole number of at least 1, got '0'"),
        (["--shape", "tiny", "--ranks", "two"], "--ranks must be a whole number of at least 1, got 'two'"),
        (["--shape", "tiny", "--json", "/no/f"], "--json must be a file in a folder that exists, got '/no/f'"),
        (["--shape", "tiny", "--rank", "2"], "bench reload: unrecognized arguments: --rank 2"),
    ],
)
def test_a_wrong_option_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared below
        read_reload_options(arguments)
    assert str(refused.value) == message


def test_a_refusal_is_one_line_and_status_2() -> None:
    ran = _bench("reload", "--shape", "tiny", "--repeats", "none")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "colo: --repeats must be a whole number of at least 1, got 'none'\n"
    unknown = _bench("relaod")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert unknown.stderr == "colo: the benchmark must be one of reload, switch, got 'relaod'\n"


def test_alone_it_lists_the_benchmarks() -> None:
    alone, options, of_switch = _bench(), _bench("reload", "--help"), _bench("switch", "--help")
    assert (alone.returncode, options.returncode) == (0, 0)
    assert "\n  reload  " in alone.stdout
    assert "\n  switch  " in alone.stdout
    for word in ("--depths", "--idle", "--cycles", "--kv-gib", "--step-s", "--run", "--ranks", "--json"):
        assert word in of_switch.stdout
    for word in ("--model", "--shape", "--policy-dtype", "--dtype", "--repeats", "--ranks", "--json", *SHAPES):
        assert word in options.stdout


def test_it_becomes_torchrun_on_one_rank_unless_told_otherwise() -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    end = ["-m", "colo.commands.bench_reload", "--shape", "tiny"]
    assert reload_command(["--shape", "tiny"], 8) == [*start, "--nproc-per-node=1", *end]
    assert reload_command(["--shape", "tiny", "--ranks=2"], 0) == [*start, "--nproc-per-node=2", *end, "--ranks=2"]
    assert switch_command(["--shape", "tiny"], 8) == [*start, "--nproc-per-node=1", end[0], SWITCH, *end[2:]]
    with pytest.raises(ValueError, match=r"^--ranks must be at most the number of GPUs 1, got 2$"):
        reload_command(["--shape", "tiny", "--ranks", "2"], 1)


def test_every_shape_has_a_config() -> None:
    assert {*CONFIGS, *TINY_SHAPES} == set(SHAPES)
