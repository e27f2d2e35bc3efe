"""The part of colo doctor that builds no engine: it reads what is there, and hands values to the checks."""

import dataclasses
import importlib.metadata
import os
import platform
import shutil
import socket
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from packaging.utils import canonicalize_name as canonical
from transformers import PreTrainedTokenizerBase

from colo.checkpoint import find_checkpoint
from colo.commands import doctor_checks as checks
from colo.commands import doctor_environment as environment
from colo.commands import doctor_host as host
from colo.commands import doctor_model as model
from colo.commands.doctor_cards import holders_of
from colo.commands.doctor_checks import Cards, Finding, note, ok, wrong
from colo.config import Config, check_config
from colo.memory_plan import Plan, make_plan
from colo.model_shape import read_draft
from colo.policy.folder import model_files
from colo.policy.shard import build_on_meta, check_trainable, read_model_config, stand_ins
from colo.recipe import load_config
from colo.resume import refuse_changed_options
from colo.rl.generator import request_seed
from colo.rl.prompts import load_prompts
from colo.rl.rewards import RewardError, Rewards
from colo.start import model_folder, read_shape, read_tokenizer
from colo.types import Prompt

T = TypeVar("T")
SAMPLE = "It is 5."
"""The completion that reward functions are tried with."""
ON_CARD_ALONE = ("cuda_graphs", "engine_buffers", "context", "communication")
"""Parts of the plan that a rank on CPU has nothing of."""
PROCESS_BYTES = 700 << 20
"""Python, torch and vLLM in a rank on CPU, before it holds anything."""
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
    _memory(subject, config, folder, len(prompts[1]) if prompts else 0)
    return prompts is not None


def _installation(subject: Subject) -> None:
    installed = {str(canonical(one.metadata["Name"])): one.version for one in importlib.metadata.distributions()}
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


def _memory(subject: Subject, config: Config, folder: Path, num_held_out: int) -> None:
    size = sum(tensor.nbytes for _, tensor in stand_ins(folder, getattr(torch, config.policy.dtype)))
    plan = subject.attempt("memory", lambda: _plan(subject, config, folder, num_held_out))
    for number, card in enumerate(subject.cards.cards[: subject.num_ranks]):
        peak = planned_peak(plan, config.engine.sleep) if plan else None
        share = config.engine.vllm.get("gpu_memory_utilization")
        subject.tell(host.card_memory(number, card, peak, holders_of(card), share))
    if plan:
        needed = host_needs(plan, subject.num_ranks, on_gpu=subject.on_gpu)
        subject.tell(host.host_memory(needed, host.available_bytes()))
    free = shutil.disk_usage("/dev/shm").free
    transport, num_ranks = config.reload.transport, subject.num_ranks
    subject.tell(host.shared_memory(free, size, transport, on_gpu=subject.on_gpu, num_ranks=num_ranks))
    kept = host.num_checkpoints(config.keep_checkpoints, config.checkpoint_every, config.num_steps, config.rollout.save)
    subject.tell(host.disk(Path(config.run_dir), (1 + MOMENTS) * size, kept))


def _plan(subject: Subject, config: Config, folder: Path, num_held_out: int) -> Plan:
    draft = config.engine.speculative.get("model")
    cards = subject.cards.cards[: subject.num_ranks]
    return make_plan(
        config,
        read_shape(config, folder),
        num_ranks=subject.num_ranks,
        card_bytes=min((card.total for card in cards), default=host.available_bytes() // subject.num_ranks),
        is_cpu=not subject.on_gpu,
        num_eval_prompts=num_held_out,
        draft=read_draft(Path(draft)) if draft and (Path(draft) / "config.json").is_file() else None,
    )


def planned_peak(plan: Plan, sleep: str) -> int:
    """What a rank holds of its card at the most, in bytes, at a depth of sleep; `auto` starts at 2."""
    return max(plan.generate_bytes, plan.update_bytes(sleep if sleep in ("none", "kv") else "2"))


def host_needs(plan: Plan, num_ranks: int, *, on_gpu: bool) -> dict[str, int]:
    """Bytes of the host's memory that all ranks take, by what for: on CPU it is their device too."""
    if on_gpu:
        return {what: num_ranks * size for what, size in plan.host.items()}
    phases = (plan.generate, plan.update | {"engine_weights": plan.generate["engine_weights"]})
    largest = max(phases, key=lambda parts: sum(parts.values()))
    parts = {part: size for part, size in largest.items() if part not in ON_CARD_ALONE}
    return {what: num_ranks * size for what, size in {"processes": PROCESS_BYTES, **parts}.items()}
