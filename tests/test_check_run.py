"""colo check run: a sound recipe passes, and what is wrong with an unsound one is named."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from colo.commands.check_run import _probes, check, failed_alike
from colo.commands.check_run_table import FAILED, NOT_TESTABLE, OK, Row, Sight, judge, table
from colo.config import Config
from colo.policy.model import Policy
from colo.ranks import Ranks
from colo.recipe import load_config
from colo.rl.prompts import load_prompts
from colo.rl.rewards import Rewards
from colo.start import Run, read_tokenizer
from colo.types import Batch, Prompt, TensorShard
from tests.ranks import run_ranks

SIGHT = Sight(
    policy="p",
    engine="e",
    tokens=[[[1, 2]], [[1, 2]]],
    num_cached=0,
    num_cached_again=32,
    gap=0.01,
    first_step=0,
    is_rewarded=True,
)


def _with(verdict: str, rows: list[Row]) -> list[str]:
    return [row.name for row in rows if row.verdict == verdict]


def _failed(rows: list[Row]) -> list[str]:
    return _with(FAILED, rows)


def _seen(**changes: Any) -> list[Sight]:
    """Four still steps, the one that learns, and the one after; `changes` are of the third."""
    after = dataclasses.replace(SIGHT, policy="q", engine="f", tokens=[[[3]], [[3]]], gap=0.012, first_step=5)
    sights = [*[SIGHT] * 5, after]
    sights[2] = dataclasses.replace(sights[2], **changes)
    return sights


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        ({}, []),
        ({"policy": "other"}, ["policy weights, learning rate 0"]),
        ({"engine": "other"}, ["engine weights, as proven"]),
        ({"tokens": [[[1, 2]], [[1, 3]]]}, ["greedy tokens"]),
        ({"num_cached": 32}, ["cached tokens"]),
        ({"gap": 0.03}, ["gap, flat"]),
    ],
)
def test_each_line_of_the_table_fails_for_its_own_reason(changes: dict[str, object], failed: list[str]) -> None:
    assert _failed(judge(_seen(**changes), num_steps=4)) == failed


def test_a_step_that_moves_nothing_or_opens_the_gap_fails() -> None:
    unmoved = [*_seen()[:5], dataclasses.replace(SIGHT, gap=0.05, first_step=5)]
    assert _failed(judge(unmoved, num_steps=4)) == ["a step that learns", "gap after it"]
    assert "FAILED  gap after it" in table(judge(unmoved, num_steps=4))


def test_the_gap_after_a_step_that_learns_is_that_of_the_new_weights_tokens() -> None:
    *before, after = _seen()
    stale = dataclasses.replace(after, gap=0.5, first_step=4)
    assert _failed(judge([*before, stale, stale, after], num_steps=4)) == []
    assert _failed(judge([*before, stale, dataclasses.replace(after, gap=0.5)], num_steps=4)) == ["gap after it"]
    assert "gap after it" not in table(judge([*before, stale], num_steps=4)), "a step raised before it could be seen"


def test_what_moved_nothing_says_why() -> None:
    assert "the weights did not change\n" in table(judge([*_seen()[:5], SIGHT], num_steps=4))
    equal = dataclasses.replace(SIGHT, is_rewarded=False)
    assert "did not change: no reward differed in any group" in table(judge([equal] * 6, num_steps=4))
    empty = dataclasses.replace(SIGHT, gap=None, first_step=5)
    rows = judge([empty] * 6, num_steps=4)
    assert "did not change: no token trained" in table(rows)
    assert (_failed(rows), _with(NOT_TESTABLE, rows)) == (["a step that learns"], ["gap, flat", "gap after it"])


def test_a_cache_that_no_prompt_can_hit_is_not_told_as_one_that_was_reset() -> None:
    sights = [dataclasses.replace(sight, num_cached_again=0) for sight in _seen()]
    assert _with(NOT_TESTABLE, judge(sights, num_steps=4)) == ["cached tokens"]
    assert "not testable  cached tokens" in table(judge(sights, num_steps=4))


def test_a_probe_is_longer_than_a_block_where_the_engine_takes_one_so_long() -> None:
    prompt = Prompt(row=0, token_ids=[1, 2, 3], text="", fields={})
    (probe,) = _probes([prompt], 32, 64)
    assert (probe.prompt_token_ids, probe.max_new_tokens) == ([1, 2, 3] * 11, 16)
    (probe,) = _probes([prompt], 32, 34)
    assert (len(probe.prompt_token_ids), probe.max_new_tokens) == (33, 1)
    (probe,) = _probes([prompt], 32, 33)
    assert (probe.prompt_token_ids, probe.max_new_tokens) == ([1, 2, 3], 16)


def _failures(ranks: Ranks) -> list[bool]:
    """Both ranks fail; then one alone, and the other because that one is gone."""
    alike = failed_alike(ranks, 60)
    ranks.gather(None, "both")
    ranks.store.delete_key(f"check/failed/{ranks.rank}")
    ranks.gather(None, "again")
    if ranks.rank == 1:
        alone = failed_alike(ranks, 0.5)
        ranks.gather(None, "gone")
        return [alike, alone]
    ranks.gather(None, "gone")
    return [alike, failed_alike(ranks, 60)]


def test_a_rank_that_fails_alone_is_told_from_ranks_that_fail_alike() -> None:
    assert run_ranks(_failures) == [[True, False], [True, False]]


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


class FailingAlone(Policy):
    """Its update raises on one rank, while the other waits for it in a collective."""

    def update(self, batch: Batch) -> dict[str, float]:
        if self.ranks.rank == 1:
            raise RuntimeError("a card fell off")
        return super().update(batch)


def _checked(
    ranks: Ranks, folder: Path, kind: type[Policy], overrides: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    common = [f"model={folder}", "run_dir=unused", "rollout.num_prompts=2"]
    config = load_config(["--config-name", "debug", *common, *overrides])
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
    sys.stderr.write(table(rows))
    return [row.name for row in rows if row.verdict != OK], [row.seen for row in rows if row.verdict != OK]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Drifting, Snapshot])
def test_weights_that_drift_or_stand_still_are_found(tiny_models: dict[str, Path], kind: type[Policy]) -> None:
    for failed, seen in run_ranks(_checked, tiny_models["qwen3"], kind):
        if kind is Drifting:
            assert failed[:2] == ["policy weights, learning rate 0", "engine weights, as proven"]
            assert seen[0] == "others than at step 0 at step 1, 2, 3, 4"
        else:
            assert "a step that learns" in failed


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("schedule=one_off", "num_steps=3"),
        ("rollout.carry_over=true", "rollout.max_carried_updates=2", "reload.proof=first"),
        ("reload.proof=off",),
    ],
    ids=["one_off", "carry_over", "unproven"],
)
def test_a_recipe_that_trains_on_older_tokens_or_proves_less_is_as_sound(
    tiny_models: dict[str, Path], overrides: tuple[str, ...]
) -> None:
    assert run_ranks(_checked, tiny_models["qwen3"], Policy, overrides) == [([], [])] * 2


@pytest.mark.slow
def test_a_recipe_that_trains_on_no_token_is_told_so(tiny_models: dict[str, Path]) -> None:
    overrides = ("loss.mask_truncated=true", "rollout.max_new_tokens=1")
    for names, seen in run_ranks(_checked, tiny_models["qwen3"], Policy, overrides):
        assert names == ["gap, flat", "a step that learns", "gap after it"]
        assert seen[1] == "the weights did not change: no token trained"


@pytest.mark.slow
def test_an_error_of_one_rank_is_that_ranks_and_not_a_line_of_the_table(tiny_models: dict[str, Path]) -> None:
    with pytest.raises(ChildFailedError) as raised:
        run_ranks(_checked, tiny_models["qwen3"], FailingAlone)
    rank, failure = raised.value.get_first_failure()
    assert rank == 1
    assert "a card fell off" in str(failure.message)


@pytest.mark.slow
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
