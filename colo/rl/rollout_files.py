"""Rollouts as rows that JSON holds: rollouts/step-N.jsonl, and what a checkpoint keeps of those under way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colo.ranks import Ranks
from colo.resume import rollout_path
from colo.types import CarriedGroup, Completion, Group, Prompt, WeightVersionSpan


def save_rollout(run_dir: Path, step: int, groups: list[Group], ranks: Ranks) -> None:
    """Write rollouts/step-N.jsonl, one completion a line in order of slot and sample. Collective; rank 0 writes.

    Fields of a prompt that JSON does not hold are written as Python shows them.
    """
    what = f"step {step}: saving the rollout"
    counted = groups if ranks.group_rank == 0 else []  # its other ranks hold the same
    rows = [row | {"prompt_fields": group.prompt.fields} for group in counted for row in group_rows(group)]
    gathered = ranks.gather(rows, what)

    def write() -> None:
        path = rollout_path(run_dir, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = sorted((row for of_rank in gathered for row in of_rank), key=lambda row: (row["slot"], row["sample"]))
        text = "".join(json.dumps(row, ensure_ascii=False, default=repr) + "\n" for row in lines)
        partial = path.with_suffix(".partial")
        # Half a surrogate pair, which UTF-8 does not hold, becomes the escape that JSON has for it.
        partial.write_bytes(text.encode(errors="backslashreplace"))
        partial.replace(path)

    ranks.from_main(write, what)


def read_rollout(path: Path) -> list[Group]:
    """The groups that `save_rollout` wrote, of all replicas, in order of slot.

    Raises:
        ValueError: a line is not such a row; names the file and the line.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().removesuffix(b"\n").split(b"\n"), start=1):
        try:
            rows.append(json.loads(line))
            groups_of(rows[-1:], _prompt)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} must hold one completion a line, got line {number}: {error!r}") from error
    return groups_of(rows, _prompt)


def group_rows(group: Group) -> list[dict[str, Any]]:
    """One row a completion: what a person reads first, and then all that makes the group again, given its prompt."""
    prompt = group.prompt
    return [
        {
            "slot": group.slot,
            "sample": completion.sample,
            "prompt": prompt.text,
            "text": text,
            "reward": reward,
            "finish_reason": completion.finish_reason,
            "prompt_row": prompt.row,
            "prompt_token_ids": prompt.token_ids,
            **_sampled(completion),
        }
        for completion, text, reward in zip(group.completions, group.texts, group.rewards, strict=True)
    ]


def groups_of(rows: list[dict[str, Any]], prompt_of: Callable[[dict[str, Any]], Prompt]) -> list[Group]:
    """The groups that `group_rows` were made of, in order of their first rows."""
    groups: dict[int, Group] = {}
    for row in rows:
        slot = row["slot"]
        if slot not in groups:
            groups[slot] = Group(slot=slot, prompt=prompt_of(row), completions=[])
        groups[slot].completions.append(_completion(row, slot))
        groups[slot].texts.append(row["text"])
        groups[slot].rewards.append(row["reward"])
    return list(groups.values())


def carried_row(group: CarriedGroup) -> dict[str, Any]:
    """One row a group; its prompt by its row and its tokens."""
    return {
        "step": group.step,
        "slot": group.slot,
        "first_step": group.first_step,
        "prompt_row": group.prompt.row,
        "prompt_token_ids": group.prompt.token_ids,
        "completions": [
            {"sample": c.sample, "finish_reason": c.finish_reason, **_sampled(c)} for c in group.completions
        ],
    }


def carried_of(row: dict[str, Any], prompt: Prompt) -> CarriedGroup:
    """The group that `carried_row` was made of."""
    completions = [_completion(sampled, row["slot"]) for sampled in row["completions"]]
    return CarriedGroup(
        prompt=prompt, step=row["step"], slot=row["slot"], first_step=row["first_step"], completions=completions
    )


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(
        row=row["prompt_row"], token_ids=row["prompt_token_ids"], text=row["prompt"], fields=row["prompt_fields"]
    )


def _sampled(completion: Completion) -> dict[str, Any]:
    return {
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "spans": [[span.start, span.end, span.version] for span in completion.spans],
        "num_cached_tokens": completion.num_cached_tokens,
    }


def _completion(row: dict[str, Any], slot: int) -> Completion:
    return Completion(
        slot=slot,
        sample=row["sample"],
        token_ids=row["token_ids"],
        logprobs=row["logprobs"],
        finish_reason=row["finish_reason"],
        spans=[WeightVersionSpan(version=version, start=start, end=end) for start, end, version in row["spans"]],
        num_cached_tokens=row["num_cached_tokens"],
    )
