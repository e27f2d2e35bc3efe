"""What a run_dir holds already, and which options a run that goes on in it may change."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import yaml

from colo.config import TINY, Config
from colo.recipe import to_yaml

CONFIG, PROMPTS = "config.yaml", "prompts.sha256"
MAY_CHANGE = frozenset(
    {
        "run_dir",
        "resume",
        "num_steps",
        "eval_every",
        "eval_prompts",
        "checkpoint_every",
        "keep_checkpoints",
        "engine",
        "reload",
        "gap",
        "batch",
        "ranks",
        "tracking",
        "policy.gradient_checkpointing",
        "policy.logprob_chunk_tokens",
        "policy.offload",
        "scoring.timeout_s",
        "rollout.save",
    }
)
"""Options, and whole sections, with which a resumed run is still the same run: they change how fast it is, what it
keeps, or when it ends."""


def holds_run(run_dir: Path) -> bool:
    """True if there is something to go on from, or to lose: a checkpoint, or a line of metrics."""
    metrics = run_dir / "metrics.jsonl"
    return any((run_dir / "checkpoints").glob("step-*")) or (metrics.is_file() and metrics.stat().st_size > 0)


def rollout_path(run_dir: Path, step: int) -> Path:
    """Where the rollout is that a step trained on, if it was saved."""
    return run_dir / "rollouts" / f"step-{step}.jsonl"


def refuse_changed_options(config: Config) -> None:
    """Refuse to go on in a run_dir with other options than its run was started with; a new run has none to keep.

    `resume=never` is left to `find_checkpoint`, which refuses a run_dir that holds a run whatever its options.

    Raises:
        ValueError: an option differs; it names the option, the run's value and this one.
    """
    if config.resume == "never" or not holds_run(Path(config.run_dir)):
        return
    _refuse_differences(config, "a resumed run keeps its options")
    path = Path(config.run_dir) / CONFIG
    was = _read(path)["num_steps"]
    if config.update.schedule != "constant" and config.num_steps != was:
        raise ValueError(
            f"num_steps must be {was} as in {path} "
            f"(update.schedule={config.update.schedule} sets the learning rates by it), got {config.num_steps}"
        )


def refuse_other_tiny_model(config: Config) -> None:
    """Refuse to evaluate a tiny model in the run_dir of a run that trains another one.

    Raises:
        ValueError: the run's tiny model is of another family or seed.
    """
    if config.model.startswith(TINY) and holds_run(Path(config.run_dir)):
        _refuse_differences(config, "the tiny model in run_dir is of that run", only=("model", "seed"))


def refuse_changed_prompts(config: Config, digest: str) -> None:
    """Refuse to go on with other rows than the run was started with: which rows a step takes follows from all of them.

    Raises:
        ValueError: the source of `prompts` has changed.
    """
    path = Path(config.run_dir) / PROMPTS
    if holds_run(Path(config.run_dir)) and path.is_file() and path.read_text() != digest:
        raise ValueError(
            f"prompts must hold the rows that the run in {config.run_dir} was started with, got others from "
            f"{config.prompts!r}\ngive another run_dir, or remove {config.run_dir}"
        )


def save_options(config: Config, prompts_digest: str) -> None:
    """Write run_dir/config.yaml and the digest of the prompts, each whole or not at all."""
    for name, text in ((CONFIG, to_yaml(config)), (PROMPTS, prompts_digest)):
        path = Path(config.run_dir) / name
        partial = path.with_name(f".{name}.partial-{os.getpid()}")
        partial.write_text(text)
        partial.replace(path)


def _refuse_differences(config: Config, why: str, only: tuple[str, ...] = ()) -> None:
    path = Path(config.run_dir) / CONFIG
    was, now = _flat(_read(path)), _flat(yaml.safe_load(to_yaml(config)))
    # An option that the file does not have yet is newer than the run.
    differ = [name for name in now if name in was and was[name] != now[name] and (name in only or not only)]
    if not differ:
        return
    first, *others = differ
    lines = [f"{first} must be {was[first]!r} as in {path} ({why}), got {now[first]!r}"]
    lines += [f"and {name} must be {was[name]!r}, got {now[name]!r}" for name in others]
    raise ValueError("\n".join([*lines, f"give another run_dir, or remove {config.run_dir}"]))


def _read(path: Path) -> dict[str, Any]:
    """The options that a run was started with, as `to_yaml` wrote them."""
    if not path.is_file():
        raise ValueError(f"run_dir must hold the {CONFIG} of its run, got {str(path.parent)!r} without it")
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} must be YAML, got {error}") from error
    if not isinstance(tree, dict) or "num_steps" not in tree:
        raise ValueError(f"{path} must be a run's options, got {str(tree)[:80]!r}")
    return tree


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """Dotted option to value, without those in MAY_CHANGE."""
    sections = {field.name for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.type)}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if name in sections and isinstance(value, dict):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return {
        name: value
        for name, value in flat.items()
        if name not in MAY_CHANGE and name.partition(".")[0] not in MAY_CHANGE
    }
