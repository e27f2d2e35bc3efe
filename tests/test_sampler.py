"""Carry-over by hand, with lengths that are known, and what a checkpoint keeps of it; then on the real vLLM."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from colo.config import Config, RolloutConfig, ScoringConfig
from colo.ranks import Ranks
from colo.resume import rollout_path
from colo.rl.carry_over import CarryOver, joined
from colo.rl.generator import request_seed
from colo.rl.prompts import prompts_at
from colo.rl.rewards import Rewards
from colo.rl.rollout_files import read_rollout
from colo.rl.sampler import Sampler
from colo.types import CarriedGroup, Completion, Group, Prompt, Request, Sampling, WeightVersionSpan
from tests.launch import FAST, numbers, train
from tests.models import stops_often
from tests.ranks import run_ranks

PROMPTS = [Prompt(row=row, token_ids=[100 + row], text=f"p{row}", fields={}) for row in range(16)]
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, stop=())
LIMIT = 10
CARRY = [
    "rollout.carry_over=true",
    "rollout.max_carried_updates=2",
    "rollout.max_new_tokens=40",
    "engine.vllm.max_model_len=96",
]


class Lengths:
    """A generator whose completions have the lengths that they are given, and which adds a token to each a step."""

    def __init__(self, lengths: dict[int, tuple[int, ...]]) -> None:
        self.lengths = lengths
        """Row of a prompt to the whole length of each of its samples."""
        self.version = "0"
        self.paused = False
        self.seeds: dict[tuple[int, int], list[int]] = {}
        """(row, sample) to the seeds with which it was submitted."""
        self._in_flight: list[tuple[Request, Completion]] = []
        self._finished: list[Completion] = []

    def require_ready(self) -> None:
        if self.paused:
            raise RuntimeError("paused")

    def submit(self, request: Request, sampling: Sampling) -> str:
        row = request.prompt_token_ids[0] - 100
        self.seeds.setdefault((row, request.sample), []).append(request.seed)
        empty = Completion(
            slot=request.slot,
            sample=request.sample,
            token_ids=[],
            logprobs=[],
            finish_reason="abort",
            spans=[],
            num_cached_tokens=1,
        )
        self._in_flight.append((request, empty))
        return ""

    def step(self) -> int:
        in_flight, self._in_flight = self._in_flight, []
        for request, before in in_flight:
            before = self._longer(before)
            total = len(request.prompt_token_ids) - 1 + len(before.token_ids)
            if total == self.lengths[request.prompt_token_ids[0] - 100][request.sample]:
                self._finished.append(dataclasses.replace(before, finish_reason="stop"))
            elif len(before.token_ids) == request.max_new_tokens:
                self._finished.append(dataclasses.replace(before, finish_reason="length"))
            else:
                self._in_flight.append((request, before))
        return len(in_flight) - len(self._in_flight)

    def finished(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished

    def abort(self) -> list[Completion]:
        aborted, self._in_flight = [completion for _, completion in self._in_flight], []
        return aborted

    def generate(self, requests: list[Request], sampling: Sampling, what: str) -> list[Completion]:
        raise AssertionError("carry-over drives the engine step by step")

    def _longer(self, completion: Completion) -> Completion:
        count = len(completion.token_ids) + 1
        return dataclasses.replace(
            completion,
            token_ids=[*completion.token_ids, count],
            logprobs=[*completion.logprobs, -0.1 * count],
            spans=[WeightVersionSpan(version=self.version, start=0, end=count)],
        )


def _config(num_prompts: int = 2, **rollout: Any) -> Config:
    return Config(
        model="tiny:qwen3",
        run_dir="unused",
        prompts="colo.rl.tasks.letters",
        reward="colo.rl.tasks.letters_reward",
        num_steps=9,
        rollout=RolloutConfig(
            num_prompts=num_prompts, group_size=2, max_new_tokens=LIMIT, **{"carry_over": True, **rollout}
        ),
    )


def _rows(step: int, num_prompts: int = 2) -> list[int]:
    """The rows of a step's prompts where none is carried."""
    return [prompt.row for prompt in prompts_at(PROMPTS, step, num_prompts, 0)]


def _told(groups: list[Group]) -> list[tuple[int, int, list[int]]]:
    """(slot, row, lengths) of each group."""
    return [(group.slot, group.prompt.row, [len(c.token_ids) for c in group.completions]) for group in groups]


def _two_steps(ranks: Ranks, third_length: int, max_carried_updates: int) -> dict[str, Any]:
    """Two prompts a step and one more under way; lengths are by the prompts' order in the endless sequence."""
    rows = [row for step in range(4) for row in _rows(step)]
    lengths = dict(zip(rows, [(2, 3), (1, third_length), (4, 4), (1, 1), (2, 2), (3, 3), (1, 2)], strict=False))
    engine = Lengths(lengths)
    carry = CarryOver(_config(carry_over_extra=1, max_carried_updates=max_carried_updates), ranks, PROMPTS, SAMPLING)
    saw: dict[str, Any] = {"rows": rows, "groups": []}
    for step in range(2):
        engine.version = str(step)
        groups, oldest = carry.sample(engine, step)
        saw[f"step_{step}"] = (_told(groups), oldest, carry.counts())
        saw[f"held_{step}"] = [group.prompt.row for group in carry.held]
        saw["groups"] = groups
    saw["seeds"] = engine.seeds[rows[1], 1]
    engine.paused = True
    with pytest.raises(RuntimeError, match="paused"):
        carry.sample(engine, 2)
    return saw


def test_a_rollout_ends_when_enough_groups_are_complete_and_the_others_go_on() -> None:
    (saw,) = run_ranks(_two_steps, 6, 4, world_size=1)
    rows = saw["rows"]
    # Step 0: 2 + 1 prompts. The first is complete after 3 tokens, the third after 4: the second has 1 and 4 of 6.
    assert saw["step_0"] == (
        [(0, rows[0], [2, 3]), (1, rows[2], [4, 4])],
        0,
        {"carried_groups": 1.0, "carried_tokens": 4.0},
    )
    # Step 1: the fourth after 1 token; after 2 the carried one, with the fifth, which waits for a place in a step.
    assert saw["step_1"] == (
        [(0, rows[3], [1, 1]), (1, rows[1], [1, 6])],
        0,
        {"carried_groups": 1.0, "carried_tokens": 0.0},
    )
    assert (saw["held_0"], saw["held_1"]) == ([rows[1]], [rows[4]])
    finished, carried = saw["groups"][1].completions
    assert [(s.version, s.start, s.end) for s in carried.spans] == [("0", 0, 4), ("1", 4, 6)]
    assert [(s.version, s.start, s.end) for s in finished.spans] == [("0", 0, 1)]
    assert carried.token_ids == [1, 2, 3, 4, 1, 2]
    assert carried.logprobs == [-0.1, -0.2, -0.1 * 3, -0.4, -0.1, -0.2]
    assert (carried.slot, carried.finish_reason, carried.num_cached_tokens) == (1, "stop", 2)
    assert saw["seeds"] == [request_seed(0, 0, 1, 1), request_seed(0, 0, 1, 1, 4)]


def test_what_would_age_past_the_limit_is_finished_first_and_never_longer_than_allowed() -> None:
    (saw,) = run_ranks(_two_steps, 99, 1, world_size=1)
    rows = saw["rows"]
    # Two others are complete after 2 tokens of step 1, and the phase goes on until the carried one has its 10.
    assert saw["step_1"][:2] == ([(0, rows[1], [1, LIMIT]), (1, rows[3], [1, 1])], 0)
    assert saw["groups"][0].completions[1].finish_reason == "length"
    (free,) = run_ranks(_two_steps, 99, 2, world_size=1)
    assert free["step_1"][:2] == ([(0, rows[3], [1, 1]), (1, rows[4], [2, 2])], 1)
    assert free["held_1"] == [rows[1]]


def _many_steps(ranks: Ranks, num_steps: int) -> dict[str, Any]:
    config = _config(carry_over_extra=2, max_carried_updates=2)
    lengths = {prompt.row: (1 + prompt.row % 3, 1 + (prompt.row * 7) % 23) for prompt in PROMPTS}
    engine, carry = Lengths(lengths), CarryOver(config, ranks, PROMPTS, SAMPLING)
    trained, ages = [], []
    for step in range(num_steps):
        engine.version = str(step)
        groups, oldest = carry.sample(engine, step)
        ages.append(step - oldest)
        versions = [int(span.version) for group in groups for c in group.completions for span in c.spans]
        assert min(versions) == oldest
        assert all(
            sum(span.end - span.start for span in c.spans) == len(c.token_ids) <= LIMIT
            for group in groups
            for c in group.completions
        )
        trained += [(group.prompt.row, group.slot) for group in groups]
    return {"trained": trained, "ages": ages, "held": [group.prompt.row for group in carry.held]}


def test_every_prompt_is_trained_on_once_and_none_is_older_than_the_limit() -> None:
    rows = run_ranks(_many_steps, 12)
    prompts = [row for step in range(13) for row in _rows(step)]
    seen = [row for saw in rows for row, _ in saw["trained"]] + [row for saw in rows for row in saw["held"]]
    assert sorted(seen) == sorted(prompts), "12 steps of 2, and 2 more under way"
    assert {slot for _, slot in rows[0]["trained"]} == {0}
    assert {slot for _, slot in rows[1]["trained"]} == {1}
    assert max(age for saw in rows for age in saw["ages"]) == 2


def test_parts_with_one_version_are_one_span_and_an_empty_part_adds_none() -> None:
    empty = Completion(
        slot=0, sample=0, token_ids=[], logprobs=[], finish_reason="abort", spans=[], num_cached_tokens=0
    )
    part = dataclasses.replace(
        empty, token_ids=[5, 6], logprobs=[-1.0, -2.0], spans=[WeightVersionSpan(version="3", start=0, end=2)]
    )
    nothing = dataclasses.replace(empty, spans=[WeightVersionSpan(version="4", start=0, end=0)])
    twice = joined(joined(joined(empty, nothing), part), part)
    assert twice.spans == [WeightVersionSpan(version="3", start=0, end=4)]
    assert twice.token_ids == [5, 6, 5, 6]


def _sampler(
    ranks: Ranks,
    folder: Path,
    prompts: list[Prompt] = PROMPTS,
    *,
    options: dict[str, Any] | None = None,
    **rollout: Any,
) -> tuple[Sampler, Lengths]:
    config = dataclasses.replace(_config(4, carry_over_extra=2, **rollout), **(options or {}))
    rewards = Rewards({"colo.rl.tasks.letters_reward": 1.0}, ScoringConfig())
    rewards.check(prompts, "prompts")
    engine = Lengths({prompt.row: (1 + prompt.row % 5, 1 + prompt.row * 3 % 8) for prompt in prompts})
    return Sampler(config, ranks, prompts, rewards, AutoTokenizer.from_pretrained(folder)), engine


def _held(sampler: Sampler) -> list[CarriedGroup]:
    assert sampler._carry_over is not None
    return sampler._carry_over.held


def _save_state(ranks: Ranks, folder: Path) -> dict[str, Any]:
    sampler, engine = _sampler(ranks, folder)
    sampler.rollout(engine, 0)
    state = json.loads(json.dumps(sampler.state()))
    again, _ = _sampler(ranks, folder)
    again.load_state(state)
    assert _held(again) == _held(sampler), "each replica gets back its own, in order"
    assert again.state() == sampler.state() == state
    return {"state": state, "next": _told(sampler.rollout(engine, 1).groups)}


def _load_state(ranks: Ranks, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    sampler, engine = _sampler(ranks, folder)
    sampler.load_state(state)
    held = [group.prompt.row for group in _held(sampler)]
    answers = [dataclasses.replace(prompt, fields={"answer": prompt.row}) for prompt in PROMPTS]
    changed: list[tuple[str, dict[str, Any]]] = [
        ("rollout.temperature", {"temperature": 0.5}),
        ("seed", {"options": {"seed": 1}}),
        ("reward", {"options": {"reward": {"colo.rl.tasks.letters_reward": 2.0}}}),
        ("scoring.timeout_reward", {"options": {"scoring": ScoringConfig(timeout_reward=-1.0)}}),
        ("prompts", {"prompts": answers}),
        ("", {"options": {"scoring": ScoringConfig(timeout_s=1.0)}}),
    ]
    left_out = {}
    for name, change in changed:
        other, _ = _sampler(ranks, folder, **change)
        other.load_state(state)
        left_out[name] = (len(_held(other)), other._differing(state, {prompt.row: prompt for prompt in other._prompts}))
    return {"held": held, "next": _told(sampler.rollout(engine, 1).groups), "left_out": left_out}


def test_what_is_under_way_goes_through_a_checkpoint_to_any_number_of_ranks(tiny_models: dict[str, Path]) -> None:
    folder = tiny_models["qwen3"]
    saved = run_ranks(_save_state, folder)
    state = saved[0]["state"]
    assert saved[1]["state"] == state
    rows = [row["prompt_row"] for row in state["carried"]]
    assert len(rows) == 2
    same = run_ranks(_load_state, folder, state)
    assert [saw["held"] for saw in same] == [rows[:1], rows[1:]]
    assert [saw["next"] for saw in same] == [saw["next"] for saw in saved]
    (alone,) = run_ranks(_load_state, folder, state, world_size=1)
    assert alone["held"] == rows
    assert len(alone["next"]) == 4
    for name, (num_held, differ) in alone["left_out"].items():
        assert (num_held, differ) == ((0, [name]) if name else (2, [])), name


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["engine.tensor_parallel_size=2"]], ids=["replicas", "tensor_parallel"])
def test_on_vllm_carried_completions_have_spans_of_several_versions_within_their_length(
    tmp_path: Path, tiny_models: dict[str, Path], more: list[str]
) -> None:
    run_dir = tmp_path / "run"
    model = stops_often(tiny_models["qwen3"], tmp_path / "model")
    train(run_dir, *FAST, *CARRY, *more, f"model={model}", "num_steps=6", "rollout.save=1", "update.lr=1e-2")
    paths = [rollout_path(run_dir, step) for step in range(6)]
    completions = [c for path in paths for group in read_rollout(path) for c in group.completions]
    for completion in completions:
        assert [span.start for span in completion.spans] == [0, *(span.end for span in completion.spans[:-1])]
        assert completion.spans[-1].end == len(completion.token_ids) == len(completion.logprobs) <= 40
        assert int(completion.spans[-1].version) - int(completion.spans[0].version) <= 2
    assert any(len(completion.spans) > 1 for completion in completions)
    rows = numbers(run_dir)
    assert max(row["rollout/staleness"] for row in rows) in (1.0, 2.0)
    assert all(row["rollout/carried_groups"] == 4.0 for row in rows)
    assert max(row["rollout/carried_tokens"] for row in rows) > 0
    for row in rows:
        assert row.get("gap/age_0/mean_abs", 0.0) < 1e-4, "what the present weights sampled is scored alike"
