"""colo check run: a sound recipe passes, and what is wrong with an unsound one is named."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from colo.commands.check_run import Row, Sight, check, judge, table
from colo.config import Config
from colo.policy.model import Policy
from colo.ranks import Ranks
from colo.recipe import load_config
from colo.rl.prompts import load_prompts
from colo.rl.rewards import Rewards
from colo.start import Run, read_tokenizer
from colo.types import Batch, TensorShard
from tests.ranks import run_ranks

SIGHT = Sight(policy="p", engine="e", tokens=[[1, 2]], num_cached=0, gap=0.01)


def _failed(rows: list[Row]) -> list[str]:
    return [row.name for row in rows if not row.is_ok]


def _seen(**changes: object) -> list[Sight]:
    """Four still steps, the one that learns, and the one after; `changes` are of the third."""
    sights = [SIGHT] * 5 + [dataclasses.replace(SIGHT, policy="q", engine="f", tokens=[[3]], gap=0.012)]
    sights[2] = dataclasses.replace(sights[2], **changes)  # type: ignore[arg-type]
    return sights


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"policy": "other"}, ["policy weights, learning rate 0"]),
        ({"engine": "other"}, ["engine weights, as proven"]),
        ({"tokens": [[1, 3]]}, ["greedy tokens"]),
        ({"num_cached": 32}, ["cached tokens"]),
        ({"gap": 0.03}, ["gap, flat"]),
    ],
)
def test_each_line_of_the_table_fails_for_its_own_reason(changes: dict[str, object], failed: list[str]) -> None:
    assert _failed(judge(_seen(**changes), num_steps=4)) == failed


def test_a_step_that_moves_nothing_or_opens_the_gap_fails() -> None:
    unmoved = [*_seen()[:5], dataclasses.replace(SIGHT, gap=0.05)]
    assert _failed(judge(unmoved, num_steps=4)) == ["a step that learns", "gap after it"]
    assert "FAILED  gap after it" in table(judge(unmoved, num_steps=4))


class Drifting(Policy):
    """Its weights move without a learning rate, on one rank, as a stray write would move them."""

    def update(self, batch: Batch) -> dict[str, float]:
        metrics = super().update(batch)
        if self.ranks.rank == 1:
            with torch.no_grad():
                next(shard.local for _, shard in self.weights() if shard.local.numel()).mul_(1.5)
        return metrics


class Snapshot(Policy):
    """Hands out what its weights were at first, as a stale view would."""

    def weights(self) -> Iterator[tuple[str, TensorShard]]:
        if "_first" not in vars(self):
            self._first = [
                (name, dataclasses.replace(shard, local=shard.local.clone())) for name, shard in super().weights()
            ]
        return iter(self._first)


def _checked(ranks: Ranks, folder: Path, kind: type[Policy]) -> tuple[list[str], list[str]]:
    config = load_config(["--config-name", "debug", f"model={folder}", "run_dir=unused", "rollout.num_prompts=2"])
    tokenizer = read_tokenizer(folder)
    prompts = load_prompts(config.prompts, "prompts", tokenizer, config.rollout).prompts
    with Rewards(config.reward_weights, config.scoring) as rewards:
        run = Run(
            config=config,
            ranks=ranks,
            model_folder=folder,
            tokenizer=tokenizer,
            prompts=prompts,
            prompts_digest="",
            eval_prompts=[],
            rewards=rewards,
        )
        make: Callable[[Config, Ranks], Policy] = lambda config, ranks: kind(config, ranks, folder)  # noqa: E731
        rows = check(run, 4, make)
    return _failed(rows), [row.seen for row in rows if not row.is_ok]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Drifting, Snapshot])
def test_weights_that_drift_or_stand_still_are_found(tiny_models: dict[str, Path], kind: type[Policy]) -> None:
    for failed, seen in run_ranks(_checked, tiny_models["qwen3"], kind):
        if kind is Drifting:
            assert failed[:2] == ["policy weights, learning rate 0", "engine weights, as proven"]
            assert seen[0] == "others than at step 0 at step 1, 2, 3, 4"
        else:
            assert "a step that learns" in failed


def test_the_command_ends_with_0_for_a_sound_recipe_and_with_2_for_a_wrong_option() -> None:
    command = [sys.executable, "-m", "colo.cli", "check", "run"]
    done = subprocess.run(
        [*command, "--config-name", "debug", "--steps", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.split("  ")[0].strip() for line in done.stdout.splitlines()] == ["ok"] * 7
    wrong = subprocess.run(
        [*command, "--config-name", "debug", "--steps", "3"], capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, wrong.stderr) == (2, "colo: --steps must be a whole number of at least 4, got '3'\n")
