"""What colo doctor finds in a model's folder: its head, end tokens, chat template and positions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from colo.commands.doctor_checks import Finding, note, ok, wrong
from colo.policy.folder import TensorFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_ROWS = 256
"""Of a tied head, at either end, that are compared with the embedding: all of it takes long to read."""
ASKED, ANSWER, ASKED_AGAIN = "What is 2 + 3?", "It is 5.", "And 2 + 4?"
THOUGHT = "<think>\n2 and 3 more.\n</think>\n\n"


@dataclass(frozen=True, kw_only=True)
class EndTokens:
    """Where a model says what ends a completion. None: it does not say."""

    config: tuple[int, ...] | None
    """config.json's eos_token_id."""
    generation: tuple[int, ...] | None
    """generation_config.json's."""
    tokenizer: int | None
    has_generation_config: bool

    @property
    def stops(self) -> set[int]:
        """What vLLM ends a completion at: the tokenizer's, and generation_config.json's or else config.json's."""
        listed = self.generation if self.has_generation_config else self.config
        return {*(listed or ()), *(() if self.tokenizer is None else (self.tokenizer,))}


def read_end_tokens(folder: Path, tokenizer: "PreTrainedTokenizerBase") -> EndTokens:
    """Of a model's folder."""
    path = folder / "generation_config.json"
    return EndTokens(
        config=_ids(text_config(folder).get("eos_token_id")),
        generation=_ids(json.loads(path.read_text()).get("eos_token_id")) if path.is_file() else None,
        tokenizer=tokenizer.eos_token_id,  # type: ignore[arg-type] - one token, whatever its type says
        has_generation_config=path.is_file(),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value) if isinstance(value, list) else (value,)


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's config.json, as it is written."""
    return json.loads((folder / "config.json").read_text())


def text_config(folder: Path) -> dict[str, Any]:
    """Of it what is said of the language model."""
    shape = read_config(folder)
    return shape | shape.get("text_config", {})


def vocabulary_size(folder: Path) -> int:
    """Rows of the embedding, by config.json."""
    return int(text_config(folder)["vocab_size"])


def end_tokens(ends: EndTokens, vocab_size: int, turn_end: int | None = None) -> list[Finding]:
    """Whether the places agree, and whether the engine can come to an end.

    Args:
        ends: What each place says.
        vocab_size: Tokens that can be sampled are below it.
        turn_end: The special token with which the chat template ends the assistant's turn, if there is one.
    """
    places = {
        "config.json": ends.config,
        "generation_config.json": ends.generation,
        "the tokenizer": None if ends.tokenizer is None else (ends.tokenizer,),
    }
    outside = {place: [one for one in ids or () if not 0 <= one < vocab_size] for place, ids in places.items()}
    found = [
        wrong("eos", f"{place} has {ids[0]}, outside of the vocabulary of {vocab_size}", f"correct it in {place}")
        for place, ids in outside.items()
        if ids
    ]
    if found:
        return found
    told = ", ".join(f"{place} {_listed(ids)}" for place, ids in places.items() if ids is not None)
    stops = f"a completion ends at {_listed(sorted(ends.stops))}"
    if not ends.stops:
        return [note("eos", "there is none: every completion runs to rollout.max_new_tokens", "set rollout.stop")]
    if turn_end is not None and turn_end not in ends.stops:
        said = f"{stops}, and the chat template ends the assistant's turn with {turn_end}, which does not"
        return [note("eos", said, "add it to eos_token_id in generation_config.json")]
    if any(set(ids) != ends.stops for ids in places.values() if ids is not None):
        return [note("eos", f"the places differ: {told}; {stops}")]
    return [ok("eos", f"{_listed(sorted(ends.stops))}, the same in {' and '.join(p for p, i in places.items() if i)}")]


def _listed(ids: Sequence[int]) -> str:
    return " and ".join(map(str, ids)) if ids else "none"


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> list[Finding]:
    """Whether the template has the model answer, starts with one BOS, and leaves earlier turns as they were."""
    name = "template"
    if tokenizer.chat_template is None:
        return [ok(name, "none: prompts are `prompt`, not `messages`")]
    try:
        asking, plain = (_rendered(tokenizer, [ASKED], is_asking=is_asking) for is_asking in (True, False))
    except (TemplateError, ValueError) as error:
        do = "give prompts as `prompt`, or the tokenizer another chat_template"
        return [wrong(name, f"it does not take one message of a user: {error}", do)]
    found = []
    bos = tokenizer.bos_token_id
    if bos is not None and list(tokenizer(asking)["input_ids"])[:2] == [bos, bos]:
        said = "it starts with a BOS, and the tokenizer puts one before it: two, where text is tokenized"
        found.append(note(name, said, "colo's prompts have one; elsewhere pass add_special_tokens=False"))
    if asking == plain:
        said = "add_generation_prompt changes nothing: the model goes on with the user's turn"
        found.append(note(name, said, "give the tokenizer a chat_template that opens the assistant's turn"))
    found += _prefixes(tokenizer, asking)
    return found or [ok(name, "one BOS at most, opens the assistant's turn, keeps earlier turns as they were")]


def _prefixes(tokenizer: "PreTrainedTokenizerBase", asking: str) -> list[Finding]:
    """What a longer chat starts with, against the shorter one."""
    for answer, kind in ((ANSWER, "an answer"), (THOUGHT + ANSWER, "an answer with a thought")):
        try:
            answered = _rendered(tokenizer, [ASKED, answer], is_asking=False)
            longer = _rendered(tokenizer, [ASKED, answer, ASKED_AGAIN], is_asking=True)
        except (TemplateError, ValueError) as error:
            return [note("template", f"it takes no second turn: {error}")]
        for shorter, later, step in ((asking, answered, kind), (answered, longer, f"a turn after {kind}")):
            if not later.startswith(shorter):
                said = f"{step} changes what came before it: a longer chat does not start with the shorter one"
                return [
                    note("template", said, "train on its first answer alone, or on the tokens as they were sampled")
                ]
    return []


def turn_end(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The special token right after an answer in the template; None where there is none, or no such token."""
    if tokenizer.chat_template is None:
        return None
    try:
        text = _rendered(tokenizer, [ASKED, ANSWER], is_asking=False)
    except (TemplateError, ValueError):  # `chat_template` says so
        return None
    ids = list(tokenizer(text.rpartition(ANSWER)[2], add_special_tokens=False)["input_ids"])
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    return ids[0] if ids and ids[0] in special else None


def _rendered(tokenizer: "PreTrainedTokenizerBase", turns: list[str], *, is_asking: bool) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=is_asking, tokenize=False))


def positions(needed: int, limit: int | None) -> Finding:
    """The longest sequence of the recipe, in tokens, against the model's max_position_embeddings."""
    if limit is None:
        return note("positions", f"config.json has no max_position_embeddings; the recipe needs {needed}")
    if needed > limit:
        said = f"the recipe's longest sequence has {needed} tokens, and the model {limit} positions"
        return wrong("positions", said, "lower rollout.max_prompt_tokens, rollout.max_new_tokens or max_model_len")
    return ok("positions", f"{needed} of {limit}")


def vocabulary(num_tokens: int, largest_id: int, vocab_size: int) -> Finding:
    """The tokenizer's tokens, and the prompts' largest, against the rows of the embedding."""
    if largest_id >= vocab_size:
        said = f"a prompt has the token {largest_id}, and the embedding {vocab_size} rows"
        return wrong("vocabulary", said, "take the tokenizer that the model was trained with")
    if num_tokens > vocab_size:
        return note("vocabulary", f"the tokenizer has {num_tokens} tokens, and the embedding {vocab_size} rows")
    return ok("vocabulary", f"{num_tokens} tokens of {vocab_size} rows")


def tied_weights(tied: dict[str, str], files: TensorFiles) -> Finding:
    """What the config ties, against the folder's tensors.

    Args:
        tied: Name of a tensor to the name of the one that it is.
        files: The folder's.
    """
    if not tied:
        return ok("tied", "the head is a tensor of its own")
    for other, name in tied.items():
        if other not in files or name not in files:
            continue
        num_rows = files.shape(name)[0]
        for rows in ((0, NUM_ROWS), (max(0, num_rows - NUM_ROWS), num_rows)):
            if files.shape(other) != files.shape(name) or not torch.equal(
                files.read(other, rows), files.read(name, rows)
            ):
                said = f"config.json ties {other} to {name}, and the folder has another tensor there"
                return wrong("tied", said, "set tie_word_embeddings to false in config.json")
    return ok("tied", ", ".join(f"{other} is {name}" for other, name in tied.items()))
