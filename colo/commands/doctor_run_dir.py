"""What colo doctor finds in run_dir: the checkpoint that the run goes on from, and the disk that its own will take."""

import os
import shutil
from pathlib import Path

from colo.checkpoint import LEFTOVERS, find_damage, list_checkpoints
from colo.commands.doctor_checks import GIB, Finding, ok, wrong
from colo.config import Config
from colo.resume import rollout_path


def resumed(run_dir: Path, resume: str) -> Finding:
    """The checkpoint that `resume` takes, against its manifest: files and sizes; the run compares hashes."""
    folders = list_checkpoints(run_dir) if resume == "auto" else []
    folder = Path(resume) if resume not in ("auto", "never") else folders[-1] if folders else None
    if folder is None:
        return ok("resume", f"{resume}: the run begins with step 0")
    damage = find_damage(folder, reads_files=False)
    if damage is None:
        return ok("resume", f"{folder} has the files of its manifest, in size")
    whole = next((other for other in reversed(folders[:-1]) if find_damage(other, reads_files=False) is None), None)
    return wrong("resume", f"{folder}: {damage}", f"resume={whole}" if whole else "take another checkpoint or run_dir")


def disk(config: Config, checkpoint_bytes: int) -> Finding:
    """The disk under run_dir against the checkpoints that will lie there at a time, and whether it can be written.

    Those that lie there already are among them, and what killed saves left is deleted before the first.
    """
    run_dir = Path(config.run_dir)
    above = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
    if not above.is_dir():
        return wrong("disk", f"{above} is a file", "name another run_dir")
    if not os.access(above, os.W_OK | os.X_OK):
        return wrong("disk", f"{above} cannot be written", "name another run_dir")
    save = config.rollout.save
    num_kept = num_checkpoints(config.keep_checkpoints, config.checkpoint_every, config.num_steps, save)
    there = sum(map(_size, _counted(run_dir, save)))
    left = sum(map(_size, (run_dir / "checkpoints").glob(LEFTOVERS)))
    free = shutil.disk_usage(above).free + left
    needed = max(checkpoint_bytes * num_kept - there, checkpoint_bytes)  # a new one is whole before an old one goes
    said = f"{free / GIB:.1f} GiB free under {run_dir}, {num_kept} checkpoints take {needed / GIB:.2f}"
    said += f" beside the {there / GIB:.2f} of those that are there" if there else ""
    return ok("disk", said) if needed <= free else wrong("disk", said, "free some, or lower keep_checkpoints")


def num_checkpoints(keep: int, every: int, num_steps: int, save_rollouts: int) -> int:
    """That lie in run_dir at most: those kept, one that is being written, and one for each saved rollout."""
    made = 1 + (num_steps // every if every else 0)
    saved = num_steps // save_rollouts if save_rollouts else 0
    return min(keep + 1, made) + saved


def _counted(run_dir: Path, save_rollouts: int) -> list[Path]:
    """Checkpoints in run_dir that `num_checkpoints` counts: not those that only an earlier rollout.save keeps."""
    folders = list_checkpoints(run_dir)
    steps = {folder: int(folder.name.removeprefix("step-")) for folder in folders}
    kept = [folder for folder in folders if rollout_path(run_dir, steps[folder]).is_file()]
    return [f for f in folders if f not in kept or (save_rollouts and steps[f] % save_rollouts == 0)]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
