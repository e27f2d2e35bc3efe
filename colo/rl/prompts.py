"""Prompts: read, tokenized and checked once, and which of them a step takes."""

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from colo.config import RolloutConfig
from colo.rl.functions import load_function
from colo.types import Prompt

if TYPE_CHECKING:  # transformers takes seconds to import, and only its type is needed
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """A prompt source, ready to sample from."""

    prompts: list[Prompt]
    """In the source's order."""
    num_dropped: int
    """Prompts left out as longer than rollout.max_prompt_tokens."""


def load_rows(source: str, option: str) -> list[dict[str, Any]]:
    """Read a prompt source.

    Args:
        source: A JSONL file, or the dotted path of a function of no arguments that returns a list of rows.
        option: The recipe's option that holds it (prompts, eval_prompts), for errors.

    Returns:
        One dict per line, in order; what is in them is not looked at yet.

    Raises:
        ValueError: no such file or function, a line that is no JSON object (by its number), or no rows at all.
    """
    if Path(source).is_file():
        rows = list(_json_lines(Path(source), option))
    elif "/" in source or source.endswith(".jsonl"):
        raise ValueError(f"{option} must be a JSONL file that exists, or a function's dotted path, got {source!r}")
    else:
        rows = _rows_of(load_function(source, option), source, option)
        if not isinstance(rows, list):
            raise ValueError(
                f"{option} must be a function that returns a list of rows, got a {type(rows).__name__} from {source}"
            )
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                raise _row_error(option, repr(row), source, index)
    if not rows:
        raise ValueError(f"{option} must hold at least one prompt, got none in {source}")
    return rows


def _rows_of(function: Callable[[], Any], source: str, option: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise ValueError(
            f"{option} must be a function that returns rows, got {source}, which raised {type(error).__name__}: {error}"
            f"\n{traceback.format_exc()}"
        ) from error


def load_prompts(source: str, option: str, tokenizer: "PreTrainedTokenizerBase", rollout: RolloutConfig) -> PromptSet:
    """Read a prompt source and tokenize it.

    A row has `prompt` (a string) or `messages` (a list of {role, content} that ends before the assistant's turn, put
    through the tokenizer's chat template once), and any other fields, which reward functions can ask for. Where the
    tokenizer starts plain text with a BOS, the token ids start with exactly one, whatever the template or the text
    adds; where it does not, none is added.

    Raises:
        ValueError: as for `load_rows`; or a row that has not one of the two, is empty, or is longer than
            rollout.max_prompt_tokens while rollout.long_prompts is "refuse" (each by its line); or all were dropped.
    """
    prompts, lengths = [], []
    reader = _reader(tokenizer, option)
    for index, row in enumerate(load_rows(source, option)):
        prompt = reader.read(row, index, source)
        lengths.append(len(prompt.token_ids))
        if lengths[-1] <= rollout.max_prompt_tokens:
            prompts.append(prompt)
        elif rollout.long_prompts == "refuse":
            raise ValueError(
                f"{option} must be at most rollout.max_prompt_tokens {rollout.max_prompt_tokens} tokens each, "
                f"got {lengths[-1]} at {source}:{index + 1}\n(rollout.long_prompts=drop leaves longer ones out)"
            )
    if not prompts:
        raise ValueError(
            f"rollout.max_prompt_tokens must be at least {min(lengths)}, the shortest prompt's length in {source}, "
            f"got {rollout.max_prompt_tokens}"
        )
    return PromptSet(prompts=prompts, num_dropped=len(lengths) - len(prompts))


def prompts_at(prompts: Sequence[Prompt], step: int, num_prompts: int, seed: int) -> list[Prompt]:
    """The prompts of a step, in order of slot: a function of (seed, step), so that resuming needs no state.

    Step `s` takes positions `s * num_prompts` to `(s + 1) * num_prompts - 1` of an endless sequence of permutations
    of all prompts, one per epoch. The number of ranks does not enter.
    """
    permutations: dict[int, np.ndarray] = {}
    taken = []
    for position in range(step * num_prompts, (step + 1) * num_prompts):
        epoch, place = divmod(position, len(prompts))
        if epoch not in permutations:
            permutations[epoch] = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        taken.append(prompts[permutations[epoch][place]])
    return taken


def _json_lines(path: Path, option: str) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:  # bytes: other line breaks that Unicode knows are legal inside a JSON string
        for index, line in enumerate(file):
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                raise _row_error(option, _short(line.decode(errors="replace").strip()), str(path), index) from error
            if not isinstance(row, dict):
                raise _row_error(option, _short(line.decode().strip()), str(path), index)
            yield row


def _row_error(option: str, got: str, source: str, index: int) -> ValueError:
    return ValueError(
        f"{option} must be one JSON object a line with `prompt` or `messages`, got {got} at {source}:{index + 1}"
    )


def _short(line: str) -> str:
    return repr(line if len(line) <= 80 else line[:77] + "...")


@dataclass(frozen=True)
class _Reader:
    """Turns rows into prompts with one tokenizer."""

    tokenizer: "PreTrainedTokenizerBase"
    option: str
    num_bos: int
    """Tokens that the tokenizer puts before plain text: 1 if that is a BOS, else 0."""
    num_eos: int
    """Tokens that it puts after: 1 if that is an EOS, else 0."""

    def read(self, row: dict[str, Any], index: int, source: str) -> Prompt:
        fields = {name: value for name, value in row.items() if name not in ("prompt", "messages")}
        if len(row) - len(fields) != 1:
            neither = f"neither among its fields {', '.join(map(repr, row)) or '(none)'}"
            got = "both" if len(row) > len(fields) else neither
            raise _row_error(self.option, got, source, index)
        if "messages" in row and "tools" in row:
            raise ValueError(
                f"{self.option} must have no `tools` beside `messages` (tools: not built yet), "
                f"got {_short(repr(row['tools']))} at {source}:{index + 1}"
            )
        read = self._read_text if "prompt" in row else self._read_messages
        token_ids, text = read(row["prompt" if "prompt" in row else "messages"], f"{source}:{index + 1}")
        if self.num_bos:
            bos = self.tokenizer.bos_token_id
            num_leading = next((place for place, token in enumerate(token_ids) if token != bos), len(token_ids))
            token_ids = [bos, *token_ids[num_leading:]]
        if len(token_ids) <= self.num_bos:
            raise ValueError(f"{self.option} must be prompts with at least one token, got none at {source}:{index + 1}")
        return Prompt(row=index, token_ids=token_ids, text=text, fields=fields)

    def _read_text(self, text: Any, line: str) -> tuple[list[int], str]:
        if not isinstance(text, str):
            raise ValueError(f"{self.option} must have a string as `prompt`, got {_short(repr(text))} at {line}")
        token_ids = list(self.tokenizer(text)["input_ids"])
        # Without the EOS that some tokenizers end a text with: the completion would start after its end.
        return token_ids[: len(token_ids) - self.num_eos], text

    def _read_messages(self, messages: Any, line: str) -> tuple[list[int], str]:
        if not _is_chat(messages):
            raise ValueError(
                f"{self.option} must have as `messages` a list of {{role, content}}, both strings, "
                f"got {_short(repr(messages))} at {line}\n(images and tool calls: not built yet)"
            )
        self._check_roles([message["role"] for message in messages], line)
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{self.option} must have `prompt`, since the model has no chat template, got `messages` at {line}"
            )
        try:
            # return_dict said outright: its default differs between transformers 4 and 5.
            encoded: Any = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except TemplateError as error:
            raise ValueError(
                f"{self.option} must be `messages` that the chat template takes, got {error} at {line}"
            ) from error
        return list(encoded["input_ids"]), messages[-1]["content"]

    def _check_roles(self, roles: list[str], line: str) -> None:
        tool = next((role for role in roles if role in ("tool", "function")), None)
        if tool is not None:
            raise ValueError(
                f"{self.option} must have no `messages` of tools (tools: not built yet), got role {tool!r} at {line}"
            )
        if roles[-1] == "assistant":
            raise ValueError(
                f"{self.option} must end before the assistant's turn, which is what is sampled "
                f"(multi-turn: not built yet), got role 'assistant' last at {line}"
            )


def _reader(tokenizer: "PreTrainedTokenizerBase", option: str) -> _Reader:
    around = list(tokenizer("a")["input_ids"])
    is_bos = tokenizer.bos_token_id is not None and around[0] == tokenizer.bos_token_id
    is_eos = tokenizer.eos_token_id is not None and around[-1] == tokenizer.eos_token_id
    return _Reader(tokenizer, option, int(is_bos), int(is_eos))


def _is_chat(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    are_messages = all(isinstance(message, dict) and set(message) == {"role", "content"} for message in messages)
    return are_messages and all(isinstance(value, str) for message in messages for value in message.values())
