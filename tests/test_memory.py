"""The ledger: its parts sum to what is measured, it sees what is freed and what is kept, and it says what would fit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from colo.cli import COMMANDS
from colo.commands.memory import memory_table
from colo.config import Config
from colo.engine.build import VllmParts, build_vllm
from colo.engine.cpu import CpuSleep
from colo.engine.memory import Ledger, OutOfMemoryError, says_out_of_memory
from colo.engine.memory_baseline import Baseline, BaselineWatch, resident_bytes
from colo.engine.memory_table import GIB, PARTS, PHASES, TOTAL, advice, as_metrics, closed, readings_in, table
from colo.ranks import Ranks
from tests.engines import CPU_OPTIONS, engine_config
from tests.ranks import run_ranks

MIB = 1 << 20
KV_BYTES = 320 * MIB
Reading = dict[str, int]


@pytest.fixture(scope="session")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of about 320 MiB, without a tokenizer."""
    folder = tmp_path_factory.mktemp("large") / "llama"
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        eos_token_id=1,
        bos_token_id=None,
        dtype=torch.float32,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def _no_policy() -> Reading:
    return {}


def _life(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The readings of an engine's depths, of an update, and of a tensor that somebody keeps."""
    watch = BaselineWatch()
    joined = torch.ones(32 * MIB // 4)
    baseline = watch.finish(ranks)
    assert joined.numel()
    del joined
    options = CPU_OPTIONS | {"kv_cache_memory_bytes": KV_BYTES, "skip_tokenizer_init": True}
    config = engine_config(vllm=options)
    parts = build_vllm(config, ranks, folder, [])
    ledger = Ledger(parts, Baseline(), _no_policy, config)
    saw: dict[str, Any] = {"build": ledger.last("build"), "baseline": dataclasses.asdict(baseline)}

    def noted(name: str, phase: str) -> None:
        ledger.note(phase)
        saw[name] = ledger.last(phase)

    parts.sleep("2")
    noted("asleep", "asleep")
    parts.wake("weights")
    noted("wake", "wake")
    parts.wake("kv_cache")
    noted("generate", "generate")
    parts.sleep("kv")
    noted("kv", "asleep")
    parts.wake("kv_cache")
    parts.sleep("1")
    noted("depth 1", "asleep")
    parts.wake("weights")
    parts.wake("kv_cache")
    noted("awake again", "generate")
    parts.sleep("2")
    with ledger.updating(lambda: {"gradients": 50 * MIB}):
        torch.ones(200 * MIB // 4)
    saw["update"] = ledger.last("update")
    noted("after the update", "asleep")
    kept = torch.ones(300 * MIB // 4)
    noted("planted", "asleep")
    with ledger.updating():
        pass
    saw["planted update"] = ledger.last("update")
    saw["kept"] = kept.nbytes
    saw["taken"] = ledger.take()
    parts.shut_down()
    return saw


@pytest.fixture(scope="module")
def life(large_model: Path) -> dict[str, Any]:
    (saw,) = run_ranks(_life, large_model, world_size=1)
    return saw


def _readings(life: dict[str, Any]) -> dict[str, Reading]:
    return {name: saw for name, saw in life.items() if isinstance(saw, dict) and TOTAL in saw and PARTS[0] in saw}


def test_memory_falls_by_weights_and_kv_on_sleep_and_comes_back_on_wake(life: dict[str, Any]) -> None:
    weights, kv_cache = life["generate"]["engine_weights"], life["generate"]["kv_cache"]
    assert weights >= 256 * MIB
    assert kv_cache >= 256 * MIB
    asleep, wake, awake = (life[name][TOTAL] for name in ("asleep", "wake", "generate"))
    assert awake - asleep == pytest.approx(weights + kv_cache, rel=0.1)
    assert wake - asleep == pytest.approx(weights, rel=0.1)
    assert awake - life["after the update"][TOTAL] == pytest.approx(weights + kv_cache, rel=0.1)


def test_depth_kv_frees_the_kv_cache_alone(life: dict[str, Any]) -> None:
    awake, slept = life["generate"], life["kv"]
    assert slept["kv_cache"] == 0
    assert slept["engine_weights"] == awake["engine_weights"]
    assert awake[TOTAL] - slept[TOTAL] == pytest.approx(awake["kv_cache"], rel=0.1)


def test_depth_1_on_cpu_frees_the_kv_cache_and_moves_the_weights_within_memory(life: dict[str, Any]) -> None:
    assert life["depth 1"]["engine_weights"] == life["generate"]["engine_weights"]
    assert life["depth 1"]["kv_cache"] == 0


def test_the_parts_of_every_reading_sum_to_its_total(life: dict[str, Any]) -> None:
    readings = _readings(life)
    assert len(readings) >= 9
    for reading in readings.values():
        assert list(reading) == [*PARTS, TOTAL]
        assert sum(reading[part] for part in PARTS) == reading[TOTAL]
    taken = readings_in(life["taken"])
    assert list(taken) == ["build", "wake", "generate", "asleep", "update"]
    for parts in taken.values():
        assert sum(parts[part] for part in PARTS) == pytest.approx(parts[TOTAL])


def test_little_is_unattributed_until_somebody_keeps_a_tensor(life: dict[str, Any]) -> None:
    for name in ("build", "asleep", "wake", "generate", "kv", "depth 1", "update", "after the update"):
        assert abs(life[name]["unattributed"]) < 30 * MIB, name
    grown = life["planted"]["unattributed"] - life["after the update"]["unattributed"]
    assert grown == pytest.approx(life["kept"], rel=0.05)
    assert life["planted update"]["unattributed"] == pytest.approx(life["planted"]["unattributed"], rel=0.05)
    assert life["planted update"]["activations"] < 10 * MIB


def test_the_update_shows_its_peak_and_not_its_end(life: dict[str, Any]) -> None:
    update = life["update"]
    assert update["activations"] + update["gradients"] == pytest.approx(200 * MIB, rel=0.1)
    assert update["gradients"] == 50 * MIB
    assert life["after the update"]["activations"] == 0


def _ledger(config: Config, policy: Reading | None = None) -> Ledger:
    """Over storages of 8 MiB each that sleep as an engine's do; no engine is built."""
    model = nn.Linear(1024, 2048, bias=False)
    sleep = CpuSleep([model], [torch.ones(2 * MIB)])
    llm: Any = None  # the ledger does not speak with vLLM on CPU
    parts = VllmParts(llm=llm, model=model, dtype=torch.float32, cpu_sleep=sleep)
    return Ledger(parts, Baseline(), lambda: policy or {}, config)


def test_metrics_come_once_for_each_note() -> None:
    ledger = _ledger(engine_config(), {"optimizer": 3 * MIB, "not a part": 1})
    assert {name.split("/")[1] for name in ledger.take()} == {"build"}
    assert ledger.take() == {}
    ledger.note("reload")
    taken = ledger.take()
    assert len(taken) == len(PARTS) + 1
    assert taken["memory_gib/reload/optimizer"] == 3 * MIB / GIB
    assert taken["memory_gib/reload/kv_cache"] == 8 * MIB / GIB
    with ledger.updating():
        pass
    assert ledger.last("update")[TOTAL] > 0


def test_memory_that_runs_out_in_the_update_is_explained() -> None:
    config = engine_config(sleep="none")
    ledger = _ledger(config)
    with pytest.raises(OutOfMemoryError) as raised, ledger.updating():
        torch.empty(1 << 60)
    said = str(raised.value)
    assert said.startswith("out of memory in the update: ")
    assert f"you tried to allocate {4 << 60} bytes" in said.splitlines()[0]
    assert ledger.table() in said
    assert "unattributed" in ledger.table()
    assert said.split("what would make it fit:\n")[1]
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert ledger.last("update")[TOTAL] > 0


def test_the_wake_is_explained_and_what_is_explained_or_something_else_goes_on_as_it_is() -> None:
    ledger = _ledger(engine_config())
    with pytest.raises(OutOfMemoryError) as raised, ledger.explains("wake_up"), ledger.explains("wake_up"):
        raise RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:119")
    said = str(raised.value)
    assert said.startswith("out of memory in the wake (wake_up): CUDA Error: out of memory at csrc")
    assert said.count("what would make it fit") == 1
    with pytest.raises(RuntimeError, match=r"^gradients are not finite$"), ledger.updating():
        raise RuntimeError("gradients are not finite")
    with pytest.raises(KeyError), ledger.explains("wake_up"):
        raise KeyError("out of memory")


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA Error: out of memory at csrc/cumem_allocator.cpp:119"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_what_is_out_of_memory(error: Exception, is_it: bool) -> None:
    assert says_out_of_memory(error) == is_it


def _held(**gib: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | gib


def _config(*, sleep: str = "2", max_tokens: int = 8192, **policy: Any) -> Config:
    config = engine_config(sleep=sleep)
    config.batch.max_tokens = max_tokens
    config.policy = dataclasses.replace(config.policy, **policy)
    return config


def _settings(parts: dict[str, float], config: Config, where: str, **options: float) -> list[str]:
    return [offer.partition(":")[0] for offer in advice(parts, config, where, **options)]


@pytest.mark.parametrize(
    ("parts", "config", "settings"),
    [
        # What the engine keeps is larger than what recomputing would free.
        (
            _held(engine_weights=15, kv_cache=30, activations=50),
            _config(sleep="none"),
            ["engine.sleep=2", "policy.gradient_checkpointing=true"],
        ),
        (
            _held(engine_weights=15, activations=100),
            _config(sleep="kv"),
            ["policy.gradient_checkpointing=true", "batch.max_tokens=4096"],
        ),
        (_held(activations=100), _config(gradient_checkpointing=True), ["batch.max_tokens=4096"]),
        # No less than one sequence of 64 + 32 tokens.
        (_held(activations=100), _config(gradient_checkpointing=True, max_tokens=150), ["batch.max_tokens=96"]),
        (
            _held(policy_parameters=30, gradients=30, optimizer=60, activations=10),
            _config(),
            ["policy.dtype=bfloat16, or more ranks", "policy.gradient_checkpointing=true"],
        ),
        (
            _held(policy_parameters=16, gradients=16, optimizer=32),
            _config(dtype="bfloat16", gradient_checkpointing=True),
            ["more ranks"],
        ),
        (
            _held(other_processes=70, activations=10),
            _config(gradient_checkpointing=True),
            ["end the other processes on this device", "batch.max_tokens=4096"],
        ),
    ],
)
def test_what_would_make_an_update_fit_is_what_frees_most(
    parts: dict[str, float], config: Config, settings: list[str]
) -> None:
    assert _settings(parts, config, "update") == settings


@pytest.mark.parametrize(
    ("parts", "offload", "kv_gib", "settings"),
    [
        # 20 of 60 GiB were mapped: nine tenths of those fit.
        (
            _held(policy_parameters=30, optimizer=35, engine_weights=15, kv_cache=20),
            "none",
            60,
            [f"engine.vllm.kv_cache_memory_bytes={18 * GIB}", "policy.offload=optimizer"],
        ),
        # The weights did not fit, so the KV cache was not begun.
        (
            _held(policy_parameters=30, optimizer=60, engine_weights=3),
            "none",
            40,
            ["policy.offload=optimizer", f"engine.vllm.kv_cache_memory_bytes={20 * GIB}"],
        ),
        (
            _held(policy_parameters=60, engine_weights=15, kv_cache=20),
            "optimizer",
            24,
            ["policy.offload=all", f"engine.vllm.kv_cache_memory_bytes={18 * GIB}"],
        ),
        (_held(policy_parameters=60, kv_cache=20), "all", 24, [f"engine.vllm.kv_cache_memory_bytes={18 * GIB}"]),
    ],
)
def test_what_would_make_a_wake_fit_is_what_the_policy_can_spare_and_a_smaller_cache(
    parts: dict[str, float], offload: str, kv_gib: float, settings: list[str]
) -> None:
    assert _settings(parts, _config(offload=offload), "wake_up", kv_gib=kv_gib) == settings


def test_advice_has_one_or_two_settings_whatever_is_held() -> None:
    for part in PARTS:
        for where in ("update", "wake_up"):
            assert 1 <= len(advice(_held(**{part: 80.0}), _config(), where)) <= 2


def test_a_reading_is_closed_by_what_is_unattributed() -> None:
    reading = closed(100, {"kv_cache": 70, "context": 40})
    assert reading["unattributed"] == -10
    assert sum(reading[part] for part in PARTS) == reading[TOTAL] == 100
    with pytest.raises(AssertionError, match="no part"):
        closed(100, {"kv": 70})


def test_what_joining_takes_is_measured(life: dict[str, Any]) -> None:
    baseline = life["baseline"]
    assert baseline["communication"] == pytest.approx(32 * MIB, rel=0.1)  # what `_life` took between the two readings
    assert baseline["num_ranks"] == 1
    assert baseline["context"] == baseline["other_processes"] == 0  # the ledger finds them itself on CPU
    assert 0 < resident_bytes()["VmRSS"] <= resident_bytes()["VmHWM"]


def _run_dir(folder: Path) -> Path:
    """With readings in steps 1 and 2 of 4."""
    readings = {phase: _held(kv_cache=float(place), total=float(place)) for place, phase in enumerate(PHASES)}
    rows: list[dict[str, Any]] = [{"step": step, "loss": 0.0} for step in range(4)]
    rows[1] |= as_metrics(readings)
    rows[2] |= as_metrics({"asleep": _held(context=2.5, total=2.5)})
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_command_prints_a_row_per_part_and_a_column_per_phase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = _run_dir(tmp_path / "run")
    COMMANDS["memory"][0]([str(run_dir), "--step", "1"])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "step 1, rank 0"
    assert header.split() == ["GiB", *PHASES]
    assert [row.split()[0] for row in rows] == [*PARTS, TOTAL]
    assert rows[1].split()[1:] == rows[-1].split()[1:] == [f"{place:.2f}" for place in range(len(PHASES))]
    step, found = memory_table(run_dir, None)
    assert step == 2
    assert found == table({"asleep": _held(context=2.5, total=2.5)})


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("0", "--step must be one with memory_gib/... (1 to 2), got '0'"),
        ("-1", "--step must be one with memory_gib/... (1 to 2), got '-1'"),
        ("two", "--step must be one with memory_gib/... (1 to 2), got 'two'"),
    ],
)
def test_a_step_without_readings_is_refused(tmp_path: Path, step: str, said: str) -> None:
    with pytest.raises(ValueError, match=" must ") as refused:
        memory_table(_run_dir(tmp_path / "run"), step)
    assert str(refused.value) == said


def test_a_folder_without_readings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^RUN_DIR must be a folder that holds the metrics\.jsonl of its run, got "):
        memory_table(tmp_path, None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    with pytest.raises(ValueError, match=r"^RUN_DIR must hold a run whose metrics have memory_gib/\.\.\., got none"):
        memory_table(tmp_path, None)
