"""A run's numbers, step by step: metrics.jsonl is the record; TensorBoard, Weights & Biases and the bar show it."""

import dataclasses
import importlib
import json
import logging
import math
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from colo.config import Config
from colo.ranks import Ranks
from colo.rl.gap import GapTrend

logger = logging.getLogger(__name__)
SHOWN = {"reward/mean": "reward", "gap/mean_abs": "gap", "loss": "loss", "time_s/step": "s"}
"""What the progress bar shows, under which name."""
RUNNING = {"reward/mean": "reward/running_mean"}
"""Metrics that are also logged as an exponential mean, and the mean's name."""
RUNNING_DECAY = 0.9
GAP_HISTORY = "gap/history"
"""Where `state` keeps what the gap's trend goes on from."""
ROLLOUTS = re.compile(r"step-(\d+)\.jsonl")


class MetricsLog:
    """Rank 0's log. Opening it drops what an earlier start of the run wrote for step `first_step` and later."""

    def __init__(self, run_dir: Path, config: Config, first_step: int, state: dict[str, Any]) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / "metrics.jsonl"
        self._num_steps = config.num_steps
        self._running = {name: value for name, value in state.items() if name != GAP_HISTORY}
        self._warn_growth = config.gap.warn_growth
        self._trend = GapTrend(config.gap.window, state.get(GAP_HISTORY, []))
        self._shown: dict[str, str] = {}
        rows = _cut_back(self._path, first_step)
        _drop_rollouts(run_dir / "rollouts", first_step)
        self._file = self._path.open("a")
        self._writer = _rebuilt_events(run_dir / "tensorboard", rows) if config.tracking.tensorboard else None
        self._wandb = _wandb_run(run_dir, config) if config.tracking.wandb_project else None
        self._bar = tqdm(total=config.num_steps, initial=first_step, desc=run_dir.name, unit="step", dynamic_ncols=True)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line, on disk when this returns, and show it. No metrics, no line.

        Raises:
            RuntimeError: a value is NaN or infinite.
        """
        _refuse_non_finite(step, metrics)
        if not metrics:
            return
        metrics = metrics | self._update_running(metrics) | self._update_trend(step, metrics)
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._writer is not None:
            _write_events(self._writer, step, metrics)
            self._writer.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **metrics})
        self._shown |= {short: f"{metrics[name]:.3g}" for name, short in SHOWN.items() if name in metrics}
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(min(step + 1, self._num_steps) - self._bar.n)

    def state(self) -> dict[str, Any]:
        """The running means and the gap's history, for the checkpoint."""
        return self._running | {GAP_HISTORY: self._trend.history}

    def _update_running(self, metrics: dict[str, float]) -> dict[str, float]:
        for name, running in RUNNING.items():
            if name in metrics:
                before = self._running.get(running, metrics[name])
                self._running[running] = RUNNING_DECAY * before + (1 - RUNNING_DECAY) * metrics[name]
        return {running: self._running[running] for name, running in RUNNING.items() if name in metrics}

    def _update_trend(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        trend = self._trend.add(metrics["gap/mean_abs"]) if "gap/mean_abs" in metrics else None
        if trend is None:
            return {}
        if self._warn_growth and trend > self._warn_growth:
            logger.warning(
                "step %d: the gap grows, as it does with stale weights: gap/trend %.3g is above gap.warn_growth=%s",
                step,
                trend,
                self._warn_growth,
            )
        return {"gap/trend": trend}

    def close(self) -> None:
        """Finish the files and the bar."""
        self._bar.close()
        self._file.close()
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoMetricsLog:
    """The other ranks' log: writes nothing, refuses what rank 0 refuses."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Raises RuntimeError where a value is NaN or infinite."""
        _refuse_non_finite(step, metrics)

    def state(self) -> dict[str, Any]:
        """Nothing: rank 0's is saved."""
        return {}

    def close(self) -> None:
        """Nothing to finish."""


def open_metrics_log(
    config: Config, first_step: int, ranks: Ranks, state: dict[str, Any] | None = None
) -> MetricsLog | NoMetricsLog:
    """The log of this rank: rank 0 writes, in config.run_dir.

    Args:
        first_step: Steps done already; later lines, rollouts and TensorBoard events are of a start that was cut short.
        state: What `state()` returned at that step.
    """
    return MetricsLog(Path(config.run_dir), config, first_step, state or {}) if ranks.is_main else NoMetricsLog()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, oldest first; a torn last line (a kill during the write) is left out.

    Raises:
        ValueError: a line before the last is not JSON.
    """
    if not path.exists():
        return []
    lines = path.read_text(errors="replace").split("\n")
    complete = lines[:-1]  # what follows the last newline was torn, or is empty
    rows = []
    for number, line in enumerate(complete, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must hold one JSON object a line, got line {number}: {line[:80]!r}") from error
    return rows


def _cut_back(path: Path, first_step: int) -> list[dict[str, Any]]:
    rows = [row for row in read_metrics(path) if row["step"] < first_step]
    aside = path.with_name(f".{path.name}.partial")
    with aside.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    return rows


def _drop_rollouts(folder: Path, first_step: int) -> None:
    for path in folder.glob("step-*.jsonl"):
        match = ROLLOUTS.fullmatch(path.name)
        if match and int(match.group(1)) >= first_step:
            path.unlink()


def _rebuilt_events(folder: Path, rows: list[dict[str, Any]]) -> SummaryWriter:
    """TensorBoard keeps events of steps that are done again, so its files are written anew from the kept lines."""
    if folder.exists():
        shutil.rmtree(folder)
    writer = SummaryWriter(str(folder))
    for row in rows:
        _write_events(writer, row["step"], {name: value for name, value in row.items() if name != "step"})
    writer.flush()
    return writer


def _write_events(writer: SummaryWriter, step: int, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


def _wandb_run(run_dir: Path, config: Config) -> Any:
    """The same Weights & Biases run after a resume; its x axis is our step, so a step done again is drawn again."""
    wandb = importlib.import_module("wandb")  # an extra, which `check_config` has looked for: most runs do without
    id_file = run_dir / "wandb_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex)
    run = wandb.init(
        project=config.tracking.wandb_project,
        id=id_file.read_text().strip(),
        resume="allow",
        name=run_dir.name,
        dir=str(run_dir),
        config=dataclasses.asdict(config),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _refuse_non_finite(step: int, metrics: dict[str, float]) -> None:
    bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    if bad:
        raise RuntimeError(
            f"step {step}: metrics must be finite numbers, got {', '.join(f'{n}={v}' for n, v in bad.items())}"
        )
