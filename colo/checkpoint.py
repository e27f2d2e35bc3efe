"""Checkpoints: written aside, hashed, renamed; verified whole before anything is loaded from one.

run_dir/checkpoints/step-N/    after N steps; loads in transformers and in vLLM
    model*.safetensors, config.json, tokenizer files ...    the Hugging Face layout
    optimizer/    optimizer*.safetensors                    full tensors: any number of ranks can load them
    trainer.json      step, the policy's counters, running means, each rank's random states
    sampled.json      what is sampled and not trained on yet, where there is any
    manifest.json     bytes and sha256 of every other file
"""

import hashlib
import json
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from colo.config import Config
from colo.ranks import Ranks
from colo.resume import rollout_path
from colo.rng import restore_rng, rng_state
from colo.tensor_files import TensorSource, write_tensors

logger = logging.getLogger(__name__)
MANIFEST, TRAINER, SAMPLED = "manifest.json", "trainer.json", "sampled.json"
OPTIMIZER = "optimizer"
"""A folder of its own: vLLM reads every safetensors file that lies beside a model's."""
MAX_FILE_BYTES = 4 << 30
COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Of the model folder's files: what describes the model and its tokenizer."""
NOT_COPIED = re.compile(r"manifest\.json|trainer\.json|sampled\.json|.*\.index\.json")
STEP = re.compile(r"step-(\d+)")
LEFTOVERS = ".step-*"


class Trained(Protocol):
    """What a checkpoint saves and restores; `colo.policy.model.Policy` is one."""

    def full_weights(self) -> Iterable[tuple[str, Tensor]]:
        """(checkpoint name, whole tensor). Collective: every rank takes all of them."""
        ...

    def optimizer_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """(name, whole tensor). Collective, as for the weights."""
        ...

    def load(self, folder: Path) -> None:
        """Fill the weights from model*.safetensors."""
        ...

    def load_optimizer(self, folder: Path) -> None:
        """Fill the optimizer from a folder's optimizer*.safetensors."""
        ...

    def state(self) -> dict[str, Any]:
        """Counters, as JSON holds them; the same on every rank."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take them back."""
        ...


def save_checkpoint(
    config: Config,
    step: int,
    policy: Trained,
    extra: dict[str, Any],
    ranks: Ranks,
    model_folder: Path,
    *,
    sampled: dict[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> Path:
    """Save what a run needs to go on after `step` steps, then delete all but the last keep_checkpoints. Collective.

    One whose step's rollout is on disk is not deleted: `colo replay` trains it on that.

    Killed at any moment, it leaves the checkpoints before it whole. Checkpoints of later steps, which a run
    left that was resumed from an earlier one, are deleted too: they are not of this run.

    Args:
        extra: What JSON holds (running means); rank 0's is saved.
        model_folder: Where config.json, the tokenizer's files and the like are copied from.
        sampled: What JSON holds of rollouts that are not trained on yet; rank 0's is saved, unless it is empty.
        max_file_bytes: Rank 0 holds one file's tensors in memory at a time; a larger tensor goes alone.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError, SafetensorError: rank 0 could not write; what it wrote is removed. Other ranks raise RuntimeError.
    """
    final = Path(config.run_dir) / "checkpoints" / f"step-{step}"
    rng = ranks.gather(rng_state(ranks.device), "saving")
    trainer = {"step": step, "policy": policy.state(), "extra": extra, "rng": rng}
    tensors = {"model": TensorSource(policy.full_weights()), "optimizer": TensorSource(policy.optimizer_tensors())}
    failure: Exception | None = None
    if ranks.is_main:
        partial = final.with_name(f".{final.name}.partial-{os.getpid()}")
        try:
            remove_leftovers(Path(config.run_dir))
            _write_partial(partial, tensors, {TRAINER: trainer, SAMPLED: sampled}, model_folder, max_file_bytes)
            _publish(partial, final)
        except Exception as error:
            shutil.rmtree(partial, ignore_errors=True)
            if any(source.has_failed for source in tensors.values()):
                raise  # in a collective, where the others still are: nothing can be agreed on
            failure = error
    # Taking a tensor is a collective, so a rank that does not write, or no longer can, takes them all the same.
    deque(chain(*tensors.values()), maxlen=0)

    def finish() -> None:
        if failure is not None:
            raise failure
        if ranks.is_main:
            _prune(final, config.keep_checkpoints)

    ranks.agreed(finish, f"saving step {step}")
    return final


def load_checkpoint(folder: Path, policy: Trained, ranks: Ranks) -> tuple[int, dict[str, Any]]:
    """Take a run up where `save_checkpoint` left it; `find_checkpoint` has verified the folder. Collective.

    Returns:
        The number of steps done, and the saved `extra`.
    """
    trainer = json.loads((folder / TRAINER).read_text())
    policy.load(folder)
    policy.load_optimizer(folder / OPTIMIZER)
    policy.load_state(trainer["policy"])
    if len(trainer["rng"]) != ranks.world_size and ranks.is_main:
        logger.warning("%s was saved by %d ranks, this run has %d", folder, len(trainer["rng"]), ranks.world_size)
    if ranks.rank < len(trainer["rng"]):
        restore_rng(trainer["rng"][ranks.rank], ranks.device)
    return trainer["step"], trainer["extra"]


def load_sampled(folder: Path | None) -> dict[str, Any]:
    """What a verified checkpoint has of rollouts that were not trained on; empty where it has none, or is None."""
    path = folder / SAMPLED if folder else None
    return json.loads(path.read_text()) if path and path.is_file() else {}


def find_checkpoint(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint to resume from, every file verified; call it on rank 0, by `ranks.from_main`.

    Args:
        resume: As the option: auto (newest in run_dir, if any), never, or a checkpoint's folder.

    Raises:
        ValueError: `never`, and run_dir holds a run; or the checkpoint is damaged: names the folder and the file,
            and offers the newest whole one before it.
    """
    folders = list_checkpoints(run_dir)
    if resume == "never":
        if folders or (run_dir / "metrics.jsonl").exists():
            raise ValueError(f"run_dir must be a folder without a run where resume=never, got {str(run_dir)!r}")
        return None
    if resume == "auto" and not folders:
        return None
    folder = folders[-1] if resume == "auto" else Path(resume)
    damage = find_damage(folder)
    if damage is None:
        return folder
    earlier = [other for other in list_checkpoints(folder.parent.parent) if _step(other) < _step(folder)]
    whole = next((other for other in reversed(earlier) if find_damage(other) is None), None)
    offer = f"the one before it is whole: resume={whole}" if whole else "there is no whole one before it"
    raise ValueError(f"resume must be a checkpoint that matches its manifest, got {str(folder)!r}: {damage}; {offer}")


def find_damage(folder: Path, *, reads_files: bool = True) -> str | None:
    """What is wrong with a checkpoint, naming the file; None where every file has its size and sha256.

    Without `reads_files` sizes alone are compared, which takes no time.
    """
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text())["files"]
        named = [(name, int(row["bytes"]), str(row["sha256"])) for name, row in files.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} is damaged ({error})"
    for name, num_bytes, sha256 in named:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{name} has {path.stat().st_size} bytes, not {num_bytes}"
        if reads_files and _sha256(path) != sha256:
            return f"{name} has another sha256"
    return None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted((path for path in (run_dir / "checkpoints").glob("step-*") if STEP.fullmatch(path.name)), key=_step)


def delete_later(run_dir: Path, step: int) -> None:
    """Delete checkpoints of steps after `step`: a run that was taken up there must not go on from them."""
    for folder in list_checkpoints(run_dir):
        if _step(folder) > step:
            logger.info("deleting %s: the run goes on from step %d", folder, step)
            _delete(folder)


def remove_leftovers(run_dir: Path) -> None:
    """Delete what killed saves left, or put back what one had moved aside; only the run that writes to run_dir may."""
    for folder in (run_dir / "checkpoints").glob(LEFTOVERS):
        final = folder.with_name(folder.name.removeprefix(".").partition(".")[0])
        if ".replaced-" in folder.name and not final.exists():
            folder.rename(final)
        else:
            shutil.rmtree(folder)


def _write_partial(
    partial: Path,
    tensors: "dict[str, TensorSource]",
    records: "dict[str, dict[str, Any] | None]",
    model_folder: Path,
    max_file_bytes: int,
) -> None:
    partial.mkdir(parents=True)
    for path in sorted(model_folder.iterdir()):
        if path.is_file() and path.suffix in COPIED_SUFFIXES and not NOT_COPIED.fullmatch(path.name):
            shutil.copyfile(path, partial / path.name)
    (partial / OPTIMIZER).mkdir()
    for stem, items in tensors.items():
        write_tensors(items, partial / OPTIMIZER if stem == OPTIMIZER else partial, stem, max_file_bytes)
    for name, record in records.items():
        if record:
            (partial / name).write_text(json.dumps(record))
    paths = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    files = {str(p.relative_to(partial)): {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in paths}
    (partial / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    for path in (*partial.rglob("*"), partial):
        _sync(path)


def _publish(partial: Path, final: Path) -> None:
    aside = final.with_name(f".{final.name}.replaced-{os.getpid()}")
    if final.exists():  # a run resumed from an earlier step comes by here again
        final.rename(aside)
    partial.rename(final)
    _sync(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _prune(final: Path, keep: int) -> None:
    delete_later(final.parent.parent, _step(final))
    for folder in list_checkpoints(final.parent.parent)[:-keep]:
        if not rollout_path(final.parent.parent, _step(folder)).is_file():
            _delete(folder)


def _delete(folder: Path) -> None:
    # Out of the list in one move: a kill halfway leaves a leftover, not a damaged checkpoint.
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.deleted-{os.getpid()}")))


def _step(folder: Path) -> int:
    match = STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
