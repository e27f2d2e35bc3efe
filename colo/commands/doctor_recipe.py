"""The part of colo doctor that builds no engine: it reads what is there, and hands values to the checks."""

import dataclasses
import importlib.metadata
import os
import platform
import socket
import time
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from packaging.utils import canonicalize_name as canonical
from transformers import PreTrainedTokenizerBase

from colo.checkpoint import find_checkpoint
from colo.commands import doctor_checks as checks
from colo.commands import doctor_environment as environment
from colo.commands import doctor_host as host
from colo.commands import doctor_memory as memory
from colo.commands import doctor_model as model
from colo.commands import doctor_run_dir as on_disk
from colo.commands.doctor_checks import Cards, Finding, note, ok, wrong
from colo.config import Config, check_config
from colo.policy.folder import model_files
from colo.policy.shard import build_on_meta, check_trainable, read_model_config
from colo.recipe import load_config
from colo.resume import refuse_changed_options
from colo.rl.generator import request_seed
from colo.rl.prompts import load_prompts
from colo.rl.rewards import RewardError, Rewards
from colo.start import model_folder, read_tokenizer, shard_bytes
from colo.types import Prompt

T = TypeVar("T")
SAMPLE = "It is 5."
"""The completion that reward functions are tried with."""
MOMENTS = 2
"""AdamW's, each as large as the weights."""


@dataclasses.dataclass(kw_only=True)
class Subject:
    """What is examined."""

    arguments: list[str]
    """What `load_config` takes."""
    num_ranks: int
    cards: Cards
    made: Path
    """A folder of our own, in the place of run_dir."""
    tell: Callable[[Finding], None]

    @property
    def on_gpu(self) -> bool:
        """Where the ranks will be."""
        return bool(self.cards.cards)

    def attempt(self, name: str, make: Callable[[], T]) -> T | None:
        """What `make` returns; None where it refuses, which is told."""
        try:
            return make()
        except (ValueError, RewardError) as error:
            self.tell(wrong(name, str(error)))
            return None


def examine(subject: Subject) -> bool:
    """Make every check that needs no engine, and tell what each found.

    Returns:
        Whether an engine can be built with what is there.
    """
    _installation(subject)
    config = _recipe(subject)
    if config is None:
        return False
    folder = subject.attempt("model", lambda: _model(config, subject.made))
    if folder is None:
        return False
    subject.tell(ok("model", f"{config.model}, {read_model_config(folder).model_type}, can be trained"))
    prompts = _text(subject, config, folder)
    num_held_out = len(prompts[1]) if prompts and config.eval_every else 0
    found = memory.memory(config, folder, num_held_out, subject.cards, subject.num_ranks)
    found.append(on_disk.resumed(Path(config.run_dir), config.resume))
    found.append(on_disk.disk(config, (1 + MOMENTS) * shard_bytes(config, folder)))
    for one in found:
        subject.tell(one)
    return prompts is not None


def _installation(subject: Subject) -> None:
    installed, leftovers = installed_packages(importlib.metadata.distributions())
    for one in leftovers:
        subject.tell(one)
    engine = next((name for name in checks.ENGINES if name in installed), "")
    pins, python = _own_pins()
    engine_pins = importlib.metadata.requires(engine) or [] if engine else []
    for found in checks.versions(pins, engine_pins, installed, (platform.python_version(), python)):
        subject.tell(found)
    found = checks.companions(installed.get("torch", ""), installed) + checks.driver(subject.cards, engine)
    if subject.on_gpu:
        pins = importlib.metadata.requires("torch") or []
        found += checks.nccl(subject.cards.nccl, pins, installed, subject.num_ranks)
    found += checks.masks(subject.cards, os.environ.get("CUDA_VISIBLE_DEVICES"), subject.num_ranks)
    found += environment.allocator(os.environ, on_gpu=subject.on_gpu)
    room = host.available_bytes() // subject.num_ranks
    found += environment.vllm_variables(os.environ, on_gpu=subject.on_gpu, kv_room_bytes=room)
    for one in (*found, *environment.ports(os.environ, socket.gethostname()), host.leftovers()):
        subject.tell(one)


def installed_packages(
    distributions: Iterable[importlib.metadata.Distribution],
) -> tuple[dict[str, str], list[Finding]]:
    """Version by name of package, and a note for each leftover: a .dist-info folder that names none."""
    installed: dict[str, str] = {}
    leftovers: list[Finding] = []
    for one in distributions:
        name = one.metadata["Name"] if "Name" in one.metadata else None  # noqa: SIM401 - its type has no get
        if name:
            installed.setdefault(str(canonical(name)), one.version)
        else:
            said = f"a .dist-info folder in {one.locate_file('')} names no package"
            leftovers.append(note("packages", said, "remove the one without METADATA, which a pip that was ended left"))
    return installed, leftovers


def _own_pins() -> tuple[list[str], str]:
    """What colo requires, and of Python; of its pyproject.toml where it runs without being installed."""
    try:
        metadata = importlib.metadata.metadata("colo")
        return importlib.metadata.requires("colo") or [], str(metadata["Requires-Python"])
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        extras = project["optional-dependencies"].items()
        optional = [f"{pin}; extra == '{extra}'" for extra, pins in extras for pin in pins]
        return [*project["dependencies"], *optional], project["requires-python"]


def _recipe(subject: Subject) -> Config | None:
    def read() -> Config:
        config = load_config(subject.arguments)
        check_config(config, subject.num_ranks)
        refuse_changed_options(config)
        if config.resume == "never":
            find_checkpoint(Path(config.run_dir), config.resume)
        return config

    config = subject.attempt("recipe", read)
    if config is not None:
        subject.tell(ok("recipe", dealt(config, subject.num_ranks)))
        subject.tell(seeds(config))
    return config


def dealt(config: Config, num_ranks: int) -> str:
    """How a step's work divides over the ranks."""
    rollout, size = config.rollout, config.engine.tensor_parallel_size
    replicas = num_ranks // size
    return (
        f"{num_ranks} ranks are {replicas} engines of {size}; each samples {rollout.num_prompts // replicas} prompts x "
        f"{rollout.group_size} a step; {config.updates_per_step} optimizer steps of "
        f"{rollout.num_prompts * rollout.group_size // config.update.num_minibatches} completions"
    )


def seeds(config: Config) -> Finding:
    """Whether the completions of a step are drawn with seeds of their own, on whatever replica."""
    rollout = config.rollout
    places = [(slot, sample) for slot in range(rollout.num_prompts) for sample in range(rollout.group_size)]
    drawn = {request_seed(config.seed, step, *place) for step in (0, 1) for place in places}
    said = f"seed {config.seed}: {len(drawn)} different ones for the {2 * len(places)} completions of two steps"
    if len(drawn) < 2 * len(places):
        return wrong("seeds", said, "take another seed")
    return ok("seeds", said)


def _model(config: Config, made: Path) -> Path:
    folder = model_folder(dataclasses.replace(config, run_dir=str(made)))
    read_model_config(folder)
    check_trainable(folder)
    return folder


def _text(subject: Subject, config: Config, folder: Path) -> tuple[list[Prompt], list[Prompt]] | None:
    """The checks of the tokenizer and of what it reads; the prompts and the held-out ones, or None without."""
    tied = build_on_meta(folder, torch.bfloat16).all_tied_weights_keys
    subject.tell(model.tied_weights(tied, model_files(folder)))
    limit = model.text_config(folder).get("max_position_embeddings")
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    subject.tell(model.positions(max(longest, config.engine.vllm.get("max_model_len", 0)), limit))
    tokenizer = subject.attempt("tokenizer", lambda: read_tokenizer(folder))
    if tokenizer is None:
        return None
    vocab_size = model.vocabulary_size(folder)
    ends, turn_end = model.read_end_tokens(folder, tokenizer), model.turn_end(tokenizer)
    for one in (*model.end_tokens(ends, vocab_size, turn_end), *model.chat_template(tokenizer)):
        subject.tell(one)
    prompts = _prompts(subject, config, tokenizer)
    if prompts is None:
        return None
    largest = max(max(prompt.token_ids) for source in prompts for prompt in source)
    subject.tell(model.vocabulary(len(tokenizer), largest, vocab_size))
    return prompts


def _prompts(
    subject: Subject, config: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], list[Prompt]] | None:
    read: list[list[Prompt]] = []
    for option in ("prompts", "eval_prompts"):
        source = getattr(config, option)
        if not source:
            read.append([])
            continue
        found = subject.attempt(option, lambda s=source, o=option: load_prompts(s, o, tokenizer, config.rollout))
        if found is None:
            return None
        longest = max(len(prompt.token_ids) for prompt in found.prompts)
        dropped = f", {found.num_dropped} left out as too long" if found.num_dropped else ""
        subject.tell(ok(option, f"{len(found.prompts)} of at most {longest} tokens{dropped}"))
        read.append(found.prompts)
    prompts, held_out = read
    found = subject.attempt("reward", lambda: _reward(config, prompts, held_out))
    if found is None:
        return None
    subject.tell(found)
    return prompts, held_out


def _reward(config: Config, prompts: list[Prompt], held_out: list[Prompt]) -> Finding:
    with Rewards(config.reward_weights, config.scoring) as rewards:
        rewards.check(prompts, "prompts")
        rewards.check(held_out, "eval_prompts")
        started = time.perf_counter()
        (score,) = rewards.score([(prompts[0], SAMPLE)])
        seconds = time.perf_counter() - started
    if score.timed_out:
        said = f"{', '.join(score.timed_out)} took longer than scoring.timeout_s {config.scoring.timeout_s:g}"
        return note("reward", said, "raise scoring.timeout_s, or every completion has scoring.timeout_reward")
    told = ", ".join(f"{path} {value:g}" for path, value in score.by_function.items())
    return ok("reward", f"{told} for {SAMPLE!r} on prompt line {prompts[0].row + 1}, in {seconds:.2f} s")
