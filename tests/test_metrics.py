"""The record of a run: a resume leaves it as if the run had never stopped."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from colo.config import Config, GapConfig
from colo.metrics import GAP_HISTORY, MetricsLog, NoMetricsLog, read_metrics
from colo.recipe import load_config


def _config(num_steps: int = 6) -> Config:
    gap = GapConfig(window=4, warn_growth=1.5)
    return Config(model="m", run_dir="r", prompts="p", reward="a.b", num_steps=num_steps, gap=gap)


def _row(step: int) -> dict[str, float]:
    return {"reward/mean": step / 3, "loss": -1.0 / (step + 1), "gap/mean_abs": 0.1 / (7 - step)}


def _scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_resumed_log_equals_one_that_never_stopped(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    log = MetricsLog(whole, _config(), 0, {})
    for step in range(6):
        log.log(step, _row(step))
    log.close()

    log = MetricsLog(cut, _config(), 0, {})
    for step in range(3):
        log.log(step, _row(step))
    state = json.loads(json.dumps(log.state()))  # a checkpoint after 3 steps
    for step in range(3, 5):
        log.log(step, _row(step) | {"loss": 7.0})
    log.close()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/me')  # killed in a write
    (cut / "rollouts").mkdir()
    for step in range(5):
        (cut / "rollouts" / f"step-{step}.jsonl").write_text("{}\n")

    log = MetricsLog(cut, _config(), 3, state)
    assert [row["step"] for row in read_metrics(cut / "metrics.jsonl")] == [0, 1, 2]
    assert sorted(path.name for path in (cut / "rollouts").iterdir()) == [f"step-{step}.jsonl" for step in range(3)]
    for step in range(3, 6):
        log.log(step, _row(step))
    log.close()
    assert (cut / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert _scalars(cut, "loss") == _scalars(whole, "loss")
    assert [row["step"] for row in read_metrics(cut / "metrics.jsonl") if "gap/trend" in row] == [3, 4, 5]
    assert [step for step, _ in _scalars(cut, "loss")] == list(range(6))


def test_each_step_is_on_disk_with_its_exact_numbers_and_running_means(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, _config(), 0, {})
    log.log(0, {"reward/mean": 1.0, "loss": 0.1 + 0.2})
    log.log(1, {"reward/mean": 0.0})
    log.log(2, {})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 0, "reward/mean": 1.0, "loss": 0.1 + 0.2, "reward/running_mean": 1.0},
        {"step": 1, "reward/mean": 0.0, "reward/running_mean": 0.9},
    ]
    assert log.state() == {"reward/running_mean": 0.9, GAP_HISTORY: []}
    log.close()


def test_a_gap_that_grows_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = MetricsLog(tmp_path, _config(), 0, {})
    for step, mean_abs in enumerate([1.0, 1.0, 1.0, 2.0, 3.0]):
        log.log(step, {"gap/mean_abs": mean_abs})
    log.log(5, {"eval/reward": 1.0})  # nothing trained: no gap, and no step of the trend
    log.close()
    trends = [row.get("gap/trend") for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert trends == [None, None, None, 1.5, 2.5, None]
    assert [record.getMessage() for record in caplog.records] == [
        "step 4: the gap grows, as it does with stale weights: gap/trend 2.5 is above gap.warn_growth=1.5"
    ]
    assert log.state() == {GAP_HISTORY: [1.0, 1.0, 2.0, 3.0]}


def test_the_bar_shows_the_numbers_that_matter_and_where_a_resumed_run_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, _config(num_steps=4), 2, {})
    log.log(2, {"reward/mean": 0.25, "gap/mean_abs": 0.001, "loss": -0.5, "time_s/step": 1.5, "lr": 1.0})
    log.log(3, {"reward/mean": 0.75, "gap/mean_abs": 0.002, "loss": -0.25, "time_s/step": 1.5, "lr": 1.0})
    log.log(4, {"eval/reward": 1.0})
    log.close()
    shown = capfd.readouterr()
    assert "2/4" in shown.err
    assert "4/4" in shown.err
    assert "5/4" not in shown.err
    assert "reward=0.75, gap=0.002, loss=-0.25, s=1.5" in shown.err
    assert shown.out == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_on_every_rank(tmp_path: Path, value: float) -> None:
    log = MetricsLog(tmp_path, _config(), 0, {})
    for each in (log, NoMetricsLog()):
        with pytest.raises(RuntimeError, match=rf"^step 3: metrics must be finite numbers, got loss={value}$"):
            each.log(3, {"loss": value, "lr": 1.0})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match="must hold one JSON object a line, got line 2: "):
        MetricsLog(tmp_path, _config(), 3, {})


def test_tensorboard_is_on_by_default_and_can_be_turned_off(tmp_path: Path) -> None:
    for name, overrides in (("on", []), ("off", ["tracking.tensorboard=false"])):
        MetricsLog(tmp_path / name, load_config(["--config-name", "debug", *overrides]), 0, {}).close()
    assert (tmp_path / "on" / "tensorboard").is_dir()
    assert not (tmp_path / "off" / "tensorboard").exists()
