"""Prompt sources, tokenization with one BOS, the order of prompts, and the built-in tasks."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from colo.config import RolloutConfig
from colo.rl import tasks
from colo.rl.prompts import load_prompts, load_rows, prompts_at
from colo.types import Prompt

BOS = 2  # "!" in the byte vocabulary: its id is all that matters
NOT_ROWS = {"prompt": "not a list"}
ROLLOUT = RolloutConfig(max_prompt_tokens=40)


@pytest.fixture
def tokenizer(tiny_models: dict[str, Path]) -> PreTrainedTokenizerFast:
    """The byte tokenizer: no BOS, a chat template."""
    return AutoTokenizer.from_pretrained(tiny_models["qwen3"])


@pytest.fixture
def bos_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same, starting each text with a BOS."""
    tokenizer.bos_token = "!"
    put_around_text(tokenizer, "! $A", "!", BOS)
    return tokenizer


def put_around_text(tokenizer: PreTrainedTokenizerFast, pattern: str, token: str, token_id: int) -> None:
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single=pattern, special_tokens=[(token, token_id)])


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def as_bytes(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_rows_become_prompts_with_their_fields(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Short."}, {"role": "user", "content": "2 + 3?\u2028"}]
    source = write_lines(
        tmp_path / "p.jsonl",
        {"prompt": "Say é", "level": 3},
        json.dumps({"messages": messages, "answer": "5"}, ensure_ascii=False),
    )
    found = load_prompts(source, "prompts", tokenizer, RolloutConfig(max_prompt_tokens=64))
    assert found.num_dropped == 0
    first, second = found.prompts
    assert (first.row, first.text, first.fields) == (0, "Say é", {"level": 3})
    assert tokenizer.decode(first.token_ids) == "Say é"
    assert (second.row, second.text, second.fields) == (1, "2 + 3?\u2028", {"answer": "5"})
    # the template once, with the words that have the model answer
    assert tokenizer.decode(second.token_ids) == "<system>Short.\n<user>2 + 3?\u2028\n<assistant>"


def test_exactly_one_bos_where_the_tokenizer_starts_text_with_one(
    tmp_path: Path, bos_tokenizer: PreTrainedTokenizerFast
) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    source = write_lines(tmp_path / "p.jsonl", {"prompt": "hi"}, {"prompt": "!hi"}, chat)
    template = str(bos_tokenizer.chat_template)
    for bos_in_template in ("", "!", "!!"):
        bos_tokenizer.chat_template = bos_in_template + template
        plain, doubled, chatted = load_prompts(source, "prompts", bos_tokenizer, ROLLOUT).prompts
        assert plain.token_ids == doubled.token_ids == [BOS, *as_bytes(bos_tokenizer, "hi")]
        assert chatted.token_ids == [BOS, *as_bytes(bos_tokenizer, "<user>hi\n<assistant>")]


def test_no_bos_where_the_tokenizer_starts_text_without_one(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.bos_token = "!"  # it has one, and does not use it
    source = write_lines(tmp_path / "p.jsonl", {"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]})
    texts = [
        tokenizer.decode(prompt.token_ids) for prompt in load_prompts(source, "prompts", tokenizer, ROLLOUT).prompts
    ]
    assert texts == ["hi", "<user>hi\n<assistant>"]


def test_no_eos_ends_a_prompt(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    put_around_text(tokenizer, "$A <eos>", "<eos>", tokenizer.get_vocab()["<eos>"])
    source = write_lines(tmp_path / "p.jsonl", {"prompt": "hi"})
    assert load_prompts(source, "prompts", tokenizer, ROLLOUT).prompts[0].token_ids == as_bytes(tokenizer, "hi")


GOOD = {"prompt": "hi"}
ONE_OBJECT = "prompts must be one JSON object a line with `prompt` or `messages`, got "


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{oops", ONE_OBJECT + "'{oops' at FILE:3"),
        ("", ONE_OBJECT + "'' at FILE:3"),
        ("[1]", ONE_OBJECT + "'[1]' at FILE:3"),
        ({"text": "hi"}, ONE_OBJECT + "neither among its fields 'text' at FILE:3"),
        ({"prompt": "hi", "messages": []}, ONE_OBJECT + "both at FILE:3"),
        ({"prompt": 7}, "prompts must have a string as `prompt`, got '7' at FILE:3"),
        ({"prompt": ""}, "prompts must be prompts with at least one token, got none at FILE:3"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "prompts must have as `messages` a list of {role, content}, both strings, "
            "got \"[{'role': 'user', 'content': None}]\" at FILE:3",
        ),
        (
            {"messages": []},
            "prompts must have as `messages` a list of {role, content}, both strings, got '[]' at FILE:3",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "prompts must have as `messages` a list of {role, content}, both strings, "
            "got \"[{'role': 'user', 'content': [{'type': 'image'}]}]\" at FILE:3",
        ),
        (
            {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "tool", "content": "5"}]},
            "prompts must have no `messages` of tools (tools: not built yet), got role 'tool' at FILE:3",
        ),
        (
            {"messages": [{"role": "user", "content": "2 + 3?"}], "tools": []},
            "prompts must have no `tools` beside `messages` (tools: not built yet), got '[]' at FILE:3",
        ),
        (
            {"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]},
            "prompts must end before the assistant's turn, which is what is sampled (multi-turn: not built yet), "
            "got role 'assistant' last at FILE:3",
        ),
        ({"prompt": "x" * 41}, "prompts must be at most rollout.max_prompt_tokens 40 tokens each, got 41 at FILE:3"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, bad: Any, message: str
) -> None:
    source = write_lines(tmp_path / "p.jsonl", GOOD, GOOD, bad, GOOD)
    with pytest.raises(ValueError, match=r"^prompts must") as caught:
        load_prompts(source, "prompts", tokenizer, ROLLOUT)
    assert str(caught.value).split("\n")[0] == message.replace("FILE", source)


def test_bytes_that_are_not_utf8_are_refused_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "hi"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=f"^eval_prompts must be one JSON object a line .* at {path}:2$"):
        load_rows(str(path), "eval_prompts")


def test_messages_need_a_chat_template_that_takes_them(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_lines(tmp_path / "p.jsonl", GOOD, {"messages": [{"role": "critic", "content": "hi"}]})
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(
        ValueError, match=r"^prompts must be `messages` that the chat template takes, got no such role at .*:2$"
    ):
        load_prompts(source, "prompts", tokenizer, ROLLOUT)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"^prompts must have `prompt`, since the model has no chat template, .*:2$"):
        load_prompts(source, "prompts", tokenizer, ROLLOUT)


def test_long_prompts_are_dropped_and_counted_when_the_recipe_says_so(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rollout = RolloutConfig(max_prompt_tokens=3, long_prompts="drop")
    source = write_lines(tmp_path / "p.jsonl", {"prompt": "long!"}, {"prompt": "abc"}, {"prompt": "longer"})
    found = load_prompts(source, "prompts", tokenizer, rollout)
    assert ([prompt.row for prompt in found.prompts], found.num_dropped) == ([1], 2)
    rollout.max_prompt_tokens = 2
    with pytest.raises(ValueError, match=r"^rollout.max_prompt_tokens must be at least 3, .*, got 2$"):
        load_prompts(source, "prompts", tokenizer, rollout)


def no_rows() -> list[dict[str, Any]]:
    return []


def not_a_list() -> dict[str, str]:
    return NOT_ROWS


def a_bad_row() -> list[Any]:
    return [{"prompt": "hi"}, "hi"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tests.test_prompts.no_rows", "prompts must hold at least one prompt, got none in tests.test_prompts.no_rows"),
        ("tests.test_prompts.not_a_list", "prompts must be a function that returns a list of rows, got a dict from"),
        ("tests.test_prompts.a_bad_row", ONE_OBJECT + "'hi' at tests.test_prompts.a_bad_row:2"),
        (
            "tests.test_prompts.NOT_ROWS",
            "prompts must be the dotted path of a function, got 'tests.test_prompts.NOT_ROWS'",
        ),
        (
            "tests.test_prompts.missing",
            "prompts must be the dotted path of a function, got 'tests.test_prompts.missing'",
        ),
        ("no_such_module.rows", "prompts must be the dotted path of a function, got 'no_such_module.rows' (ModuleNot"),
        ("rows", "prompts must be the dotted path of a function, got 'rows'"),
        (
            "missing/p.jsonl",
            "prompts must be a JSONL file that exists, or a function's dotted path, got 'missing/p.jsonl'",
        ),
    ],
)
def test_a_source_that_gives_no_rows_is_refused_by_name(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^prompts must") as caught:
        load_rows(source, "prompts")
    assert str(caught.value).startswith(message)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^prompts must hold at least one prompt, got none in"):
        load_rows(write_lines(tmp_path / "p.jsonl"), "prompts")


def numbered(count: int) -> list[Prompt]:
    return [Prompt(row=row, token_ids=[row], text=str(row), fields={}) for row in range(count)]


@pytest.mark.parametrize("num_prompts", [1, 3, 7, 20])
def test_each_epoch_takes_every_prompt_once_in_an_order_of_its_own(num_prompts: int) -> None:
    prompts = numbered(7)
    order = [prompt.row for step in range(21) for prompt in prompts_at(prompts, step, num_prompts, seed=5)]
    epochs = [tuple(order[start : start + 7]) for start in range(0, len(order) - 6, 7)]
    assert len(epochs) == 3 * num_prompts
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(epochs)) == len(epochs)


def test_a_step_takes_the_same_prompts_whatever_came_before() -> None:
    prompts = numbered(10)
    assert [prompt.row for prompt in prompts_at(prompts, 4, 6, seed=1)] == [
        prompt.row for step in range(8, 10) for prompt in prompts_at(prompts, step, 3, seed=1)
    ]
    assert prompts_at(prompts, 4, 6, seed=1) == prompts_at(numbered(10), 4, 6, seed=1)
    assert prompts_at(prompts, 4, 6, seed=1) != prompts_at(prompts, 4, 6, seed=2)


def test_the_arithmetic_tasks_are_right_and_share_no_problem() -> None:
    train, heldout = tasks.arithmetic(), tasks.arithmetic_heldout()
    assert (len(train), len(heldout)) == (2 * 90 * 90 - 256, 256)
    questions = Counter(row["messages"][0]["content"] for row in train + heldout)
    assert max(questions.values()) == 1
    for row in train[::97] + heldout:
        a, sign, b = row["messages"][0]["content"].split("?")[0].split()[2:]
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert tasks.arithmetic_reward(f"{a} {sign} {b} = {row['answer']}", row["answer"]) == 1.0
    assert tasks.arithmetic_heldout() == heldout


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("91", "91", 1.0),
        ("It is 90. No, 91.", "91", 1.0),
        ("91 is my answer, not 90", "91", 0.0),
        ("-23", "-23", 1.0),
        ("23", "-23", 0.0),
        ("34-57", "57", 1.0),
        ("34-57=-23", -23, 1.0),
        ("0" * 9 + "7", "7", 0.0),
        ("1" * 5000, "91", 0.0),
        ("ninety-one", "91", 0.0),
        ("", "0", 0.0),
    ],
)
def test_the_last_integer_is_the_answer(completion: str, answer: str | int, reward: float) -> None:
    assert tasks.arithmetic_reward(completion, answer) == reward


def test_the_letters_reward_is_a_share_of_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    assert [tasks.letters_reward(text) for text in ("", "abcz", "aB1z", "é ñ", "AZ")] == [0.0, 1.0, 0.5, 0.0, 0.0]
    rows = tasks.letters()
    assert len({row["prompt"] for row in rows}) == 36
    assert max(len(as_bytes(tokenizer, row["prompt"])) for row in rows) <= 24


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("It is 81.", "81", 1.0),
        ("71", "81", 1 / 2),
        ("181", "81", 2 / 3),
        ("18", "-18", 2 / 3),
        ("-18", "-18", 1.0),
        ("118", "81", 0.0),
        ("no number", "81", 0.0),
        ("0081", "81", 1.0),
    ],
)
def test_digits_reward_is_the_share_of_characters_in_their_places(completion: str, answer: str, reward: float) -> None:
    assert tasks.arithmetic_digits_reward(completion, answer) == reward
