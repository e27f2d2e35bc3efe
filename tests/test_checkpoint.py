"""Saving and resuming: what is saved comes back bit for bit, and nothing that goes wrong costs the last good one."""

import dataclasses
import json
import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from transformers import AutoModelForCausalLM, AutoTokenizer

from colo.checkpoint import (
    find_checkpoint,
    find_damage,
    list_checkpoints,
    load_checkpoint,
    load_sampled,
    save_checkpoint,
)
from colo.config import Config
from colo.ranks import Ranks
from colo.resume import rollout_path
from colo.train import checkpoint_to_resume, take_up
from tests.ranks import run_ranks

KIB = 1024


class Weights:
    """What a checkpoint sees of a policy: plain tensors, one of them a view; each rank counts what it takes."""

    def __init__(self, ranks: Ranks, tensors: dict[str, Tensor], *, kill_at: int | None = None) -> None:
        self.ranks, self.tensors, self.kill_at = ranks, tensors, kill_at
        self.moments = {f"exp_avg.{name}": tensor * 2 for name, tensor in tensors.items()}
        self.num_updates = 0
        self.taken = 0

    def _take(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(tensors.items()):
            torch.distributed.all_reduce(torch.ones(1))  # each item is a collective, as gathering shards is
            if number == self.kill_at and self.ranks.is_main:
                os.kill(os.getpid(), signal.SIGKILL)
            self.taken += 1
            yield item

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._take(self.tensors)

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self._take(self.moments)

    def load(self, folder: Path) -> None:
        self.tensors = _read(folder, "model")

    def load_optimizer(self, folder: Path) -> None:
        self.moments = _read(folder, "optimizer")

    def state(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_updates = state["num_updates"]


def _read(folder: Path, stem: str) -> dict[str, Tensor]:
    return {
        name: tensor for file in sorted(folder.glob(f"{stem}*.safetensors")) for name, tensor in load_file(file).items()
    }


def _tensors(scale: float = 1.0) -> dict[str, Tensor]:
    stack = torch.arange(6 * KIB, dtype=torch.float32).reshape(6, KIB) * scale
    return {"experts.0": stack[:3], "experts.1": stack[3:], "norm": torch.ones(8, dtype=torch.bfloat16)}


def _config(run_dir: Path, keep: int = 2) -> Config:
    return Config(model="m", run_dir=str(run_dir), prompts="p", reward="a.b", num_steps=9, keep_checkpoints=keep)


def _draws() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def _save_and_load(ranks: Ranks, run_dir: Path, model_folder: Path) -> dict[str, Any]:
    random.seed(ranks.rank)
    np.random.seed(ranks.rank)
    torch.manual_seed(ranks.rank)
    policy = Weights(ranks, _tensors())
    policy.num_updates = 3
    config = _config(run_dir)
    for step in (1, 2):
        save_checkpoint(config, step, policy, {}, ranks, model_folder)
    extra = {"reward": 0.1 + 0.2}
    folder = save_checkpoint(config, 3, policy, extra, ranks, model_folder, max_file_bytes=16 * KIB)
    drawn = _draws()
    loaded = Weights(ranks, {})
    step, loaded_extra = load_checkpoint(folder, loaded, ranks)
    return {
        "step": step,
        "extra": loaded_extra == extra,
        "num_updates": loaded.num_updates,
        "tensors": all(torch.equal(loaded.tensors[name], tensor) for name, tensor in policy.tensors.items()),
        "moments": all(torch.equal(loaded.moments[name], tensor) for name, tensor in policy.moments.items()),
        "names": sorted(loaded.tensors | loaded.moments) == sorted(policy.tensors | policy.moments),
        "rng": drawn == _draws(),
        "drawn": drawn,
        "folders": [path.name for path in sorted((run_dir / "checkpoints").iterdir())],
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors*")),
    }


def test_each_rank_gets_back_what_was_saved_and_older_checkpoints_are_deleted(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    rows = run_ranks(_save_and_load, tmp_path, tiny_models["qwen3"])
    assert rows[0].pop("drawn") != rows[1].pop("drawn"), "each rank has random states of its own"
    assert rows[0] == rows[1]
    assert rows[0] == {
        "step": 3,
        "extra": True,
        "num_updates": 3,
        "tensors": True,
        "moments": True,
        "names": True,
        "rng": True,
        "folders": ["step-2", "step-3"],
        "files": [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "optimizer/optimizer-00001-of-00002.safetensors",
            "optimizer/optimizer-00002-of-00002.safetensors",
            "optimizer/optimizer.safetensors.index.json",
        ],
    }


def _save_model(ranks: Ranks, run_dir: Path, model_folder: Path, max_file_bytes: int) -> None:
    weights = {name: tensor + 1 for name, tensor in load_file(model_folder / "model.safetensors").items()}
    save_checkpoint(
        _config(run_dir), 5, Weights(ranks, weights), {}, ranks, model_folder, max_file_bytes=max_file_bytes
    )


def test_transformers_loads_a_checkpoint_of_several_files(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    source = tiny_models["llama"]
    run_ranks(_save_model, tmp_path, source, 64 * KIB, world_size=1)
    folder = tmp_path / "checkpoints" / "step-5"
    assert find_checkpoint(tmp_path, "auto") == folder
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in load_file(source / "model.safetensors").items():
        assert torch.equal(loaded[name], tensor + 1), name
    assert (
        AutoTokenizer.from_pretrained(folder)("ab")["input_ids"]
        == AutoTokenizer.from_pretrained(source)("ab")["input_ids"]
    )


def _two_checkpoints(ranks: Ranks, run_dir: Path, model_folder: Path, steps: tuple[int, ...] = (1, 2)) -> None:
    for step in steps:
        save_checkpoint(_config(run_dir), step, Weights(ranks, _tensors(step)), {}, ranks, model_folder)


def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_offered(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    run_ranks(_two_checkpoints, tmp_path, tiny_models["qwen3"], world_size=1)
    first, second = list_checkpoints(tmp_path)
    assert find_checkpoint(tmp_path, "auto") == second
    assert find_checkpoint(tmp_path, str(first)) == first

    path = second / "optimizer" / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    offer = f"the one before it is whole: resume={first}"
    limit = f"resume must be a checkpoint that matches its manifest, got {str(second)!r}: "
    for resume in ("auto", str(second)):
        with pytest.raises(ValueError, match="resume must be") as raised:
            find_checkpoint(tmp_path, resume)
        assert str(raised.value) == f"{limit}optimizer/optimizer.safetensors has another sha256; {offer}"

    path.write_bytes(content[:-1])
    assert find_damage(second) == f"optimizer/optimizer.safetensors has {len(content) - 1} bytes, not {len(content)}"
    path.unlink()
    assert find_damage(second) == "optimizer/optimizer.safetensors is missing"
    for damaged in ("[]", '{"files": []}', '{"files": {"a": 1}}', "{"):
        (second / "manifest.json").write_text(damaged)
        assert find_damage(second) is not None
    assert "manifest.json is damaged" in str(find_damage(second))
    (first / "trainer.json").unlink()
    with pytest.raises(ValueError, match="there is no whole one before it"):
        find_checkpoint(tmp_path, "auto")


def test_never_refuses_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "never") is None
    assert find_checkpoint(tmp_path, "auto") is None
    (tmp_path / "metrics.jsonl").write_text("")
    assert find_checkpoint(tmp_path, "auto") is None, "a run killed before its first checkpoint starts anew"
    with pytest.raises(ValueError, match="run_dir must be a folder without a run where resume=never, got '/"):
        find_checkpoint(tmp_path, "never")


def _save_beside_rollouts(ranks: Ranks, run_dir: Path, model_folder: Path) -> list[dict[str, Any]]:
    sampled = {"pending": [{"logprobs": [-0.1 - 0.2, -1e-310]}]}
    for step, kept in ((2, {}), (3, sampled), (4, {}), (5, sampled)):
        folder = save_checkpoint(
            _config(run_dir, keep=1), step, Weights(ranks, _tensors()), {}, ranks, model_folder, sampled=kept
        )
        if ranks.is_main:
            rollout_path(run_dir, 3).parent.mkdir(exist_ok=True)
            rollout_path(run_dir, 3).touch()
    return [load_sampled(folder), sampled]


def test_a_checkpoint_whose_rollout_is_on_disk_is_kept_and_what_is_sampled_is_under_the_manifest(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    assert load_sampled(None) == {}
    for loaded, sampled in run_ranks(_save_beside_rollouts, tmp_path, tiny_models["qwen3"]):
        assert loaded == sampled
    folders = list_checkpoints(tmp_path)
    assert [folder.name for folder in folders] == ["step-3", "step-5"]
    assert [(folder / "sampled.json").is_file() for folder in folders] == [True, True]
    (folders[1] / "sampled.json").write_text("{}")
    assert find_damage(folders[1]) == "sampled.json has 2 bytes, not 60"


def _kill_main_in_a_save(ranks: Ranks, run_dir: Path, model_folder: Path) -> None:
    _two_checkpoints(ranks, run_dir, model_folder)
    save_checkpoint(_config(run_dir), 3, Weights(ranks, _tensors(), kill_at=2), {}, ranks, model_folder)


def test_a_kill_during_a_save_leaves_the_last_good_one_and_the_next_save_clears_up(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    with pytest.raises(ChildFailedError):
        run_ranks(_kill_main_in_a_save, tmp_path, tiny_models["qwen3"])
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left[0].startswith(".step-3.partial-")
    assert left[1:] == ["step-1", "step-2"]
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoints" / "step-2"
    run_ranks(_two_checkpoints, tmp_path, tiny_models["qwen3"], (3,), world_size=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-3"]


def _fill_the_disk(ranks: Ranks, run_dir: Path, model_folder: Path) -> dict[str, Any]:
    _two_checkpoints(ranks, run_dir, model_folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write past the limit fails, as on a full disk
    if ranks.is_main:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * KIB, resource.RLIM_INFINITY))
    policy = Weights(ranks, _tensors())
    caught = ""
    try:
        save_checkpoint(_config(run_dir), 3, policy, {}, ranks, model_folder)
    except Exception as error:  # noqa: BLE001 - which one it is, is what the test asks
        caught = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return {"error": caught, "taken": policy.taken}


def test_a_full_disk_during_a_save_is_an_error_on_every_rank_and_leaves_the_last_good_one(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    rows = run_ranks(_fill_the_disk, tmp_path, tiny_models["qwen3"])
    assert "File too large" in rows[0]["error"]
    assert rows[1]["error"].startswith("RuntimeError: saving step 3 failed on rank 0: ")
    assert [row["taken"] for row in rows] == [6, 6], "rank 0 takes part in every gather that the others wait in"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoints" / "step-2"


def test_a_run_resumed_from_an_earlier_step_replaces_the_later_ones(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    run_ranks(_two_checkpoints, tmp_path, tiny_models["qwen3"], (2, 4, 3, 2), world_size=1)
    folders = [path.name for path in list_checkpoints(tmp_path)]
    assert folders == ["step-2"]
    assert json.loads((tmp_path / "checkpoints" / "step-2" / "trainer.json").read_text())["step"] == 2
    assert find_damage(tmp_path / "checkpoints" / "step-2") is None


def _take_up_the_first(ranks: Ranks, run_dir: Path, model_folder: Path) -> dict[str, Any]:
    _two_checkpoints(ranks, run_dir, model_folder, (2, 4))
    config = dataclasses.replace(_config(run_dir), resume=str(run_dir / "checkpoints" / "step-2"))
    policy = Weights(ranks, {})
    first_step, _ = take_up(find_checkpoint(run_dir, config.resume), config, policy, ranks)
    found = find_checkpoint(run_dir, "auto")
    return {"first_step": first_step, "loaded": bool(policy.tensors), "newest": found and found.name}


def test_a_run_taken_up_at_an_earlier_step_never_goes_on_from_the_later_ones(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    for row in run_ranks(_take_up_the_first, tmp_path, tiny_models["qwen3"]):
        assert row == {"first_step": 2, "loaded": True, "newest": "step-2"}
    with pytest.raises(ValueError, match="num_steps must be") as raised:
        checkpoint_to_resume(dataclasses.replace(_config(tmp_path), num_steps=1))
    checkpoint = tmp_path / "checkpoints" / "step-2"
    assert str(raised.value) == f"num_steps must be at least 2, the steps of {checkpoint}, got 1"
    assert checkpoint_to_resume(dataclasses.replace(_config(tmp_path), num_steps=2)) == checkpoint
