"""Which rollout a step trains on, and how old it is: by hand, and in a run that is killed and started again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colo.config import Config, RolloutConfig, UpdateConfig, check_config
from colo.recipe import load_config
from colo.rl.schedule import OneOff, OnPolicy, Schedule
from colo.types import Rollout
from tests.launch import FAST, numbers, train


def _drive(schedule: Schedule, steps: range) -> tuple[list[str], list[int]]:
    """What happens in which step, and the staleness of what each trains on."""
    events, staleness = [], []

    def sampler(now: int) -> Callable[[int], Rollout]:
        def sample(step: int) -> Rollout:
            events.append(f"{now} samples for {step}")
            return Rollout(groups=[], first_step=now, metrics={"of": step})

        return sample

    for step in steps:
        rollout = schedule.rollout(step, sampler(step))
        assert rollout.metrics["of"] == step
        staleness.append(step - rollout.first_step)
    return events, staleness


def test_on_policy_trains_on_what_the_step_itself_samples() -> None:
    assert _drive(OnPolicy(), range(3)) == (["0 samples for 0", "1 samples for 1", "2 samples for 2"], [0, 0, 0])


def test_one_off_trains_on_what_the_step_before_sampled_and_samples_nothing_in_vain() -> None:
    schedule = OneOff(4)
    events, staleness = _drive(schedule, range(4))
    assert events == ["0 samples for 0", "0 samples for 1", "1 samples for 2", "2 samples for 3"]
    assert staleness == [0, 1, 1, 1]
    assert schedule.pending is None


def test_one_off_goes_on_from_what_was_pending() -> None:
    first = OneOff(4)
    _drive(first, range(2))
    second = OneOff(4)
    second.pending = first.pending
    assert _drive(second, range(2, 4)) == (["2 samples for 3"], [1, 1])


def _config(**sections: Any) -> Config:
    return Config(
        model="tiny:qwen3",
        run_dir="unused",
        prompts="colo.rl.tasks.letters",
        reward="colo.rl.tasks.letters_reward",
        num_steps=1,
        **sections,
    )


@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("schedule must be one of on_policy, one_off, got 'late'", lambda: _config(schedule="late")),
        (
            "schedule must be on_policy with rollout.carry_over, got 'one_off'",
            lambda: _config(schedule="one_off", rollout=RolloutConfig(carry_over=True)),
        ),
        (
            "rollout.max_carried_updates must be at least update.num_minibatches x update.num_epochs 6, got 4",
            lambda: _config(
                rollout=RolloutConfig(carry_over=True), update=UpdateConfig(num_minibatches=2, num_epochs=3)
            ),
        ),
        (
            "rollout.carry_over_extra must be 0 without rollout.carry_over, got 2",
            lambda: RolloutConfig(carry_over_extra=2),
        ),
        (
            "rollout.carry_over_extra must be at most rollout.num_prompts 8, got 9",
            lambda: RolloutConfig(carry_over=True, carry_over_extra=9),
        ),
        (
            "rollout.stop must be empty with rollout.carry_over, got ['.']",
            lambda: RolloutConfig(carry_over=True, stop=["."]),
        ),
        (
            "rollout.carry_over_extra must be a multiple of the 2 engine replicas, got 3",
            lambda: check_config(_config(rollout=RolloutConfig(carry_over=True, carry_over_extra=3)), 2),
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        make()
    assert str(raised.value) == message


def test_a_recipe_takes_both() -> None:
    config = load_config(["--config-name", "debug", "rollout.carry_over=true", "update.num_minibatches=2"])
    assert (config.num_extra_prompts, config.max_carried_steps) == (8, 2)
    assert load_config(["--config-name", "debug", "schedule=one_off"]).schedule == "one_off"


def test_one_off_trains_on_tokens_of_the_step_before_and_is_never_older(tmp_path: Path) -> None:
    train(tmp_path / "run", *FAST, "num_steps=4", "schedule=one_off", "update.num_minibatches=2")
    rows = numbers(tmp_path / "run")
    assert [row["rollout/staleness"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    assert max(rows[0]["gap/max_abs"], 1e-4) == 1e-4, "the first step trains on its own rollout"
    for row in rows[1:]:
        ages = {name for name in row if name.startswith("gap/age_")}
        assert {name.split("/")[1] for name in ages} == {"age_2"}, "two updates a step"
        assert row["gap/age_2/num_tokens"] == row["tokens/trained"]
        assert row["gap/mean_abs"] > 1e-3, "weights of a step before"
