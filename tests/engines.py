"""Configs, requests and refusals for tests that drive an engine."""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from colo.config import Config, EngineConfig, PolicyConfig, ReloadConfig, RolloutConfig
from colo.engine.cpu import repack_experts
from colo.engine.engine import Engine
from colo.engine.states import EngineStateError
from colo.rl.sampler import request_seed
from colo.types import Completion, Request, Sampling

PROMPT = list(range(5, 45))
SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, stop=())
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, stop=())
CPU_OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 32 << 20, "block_size": 32}


def engine_config(
    *,
    compute_dtype: str = "float32",
    vllm: dict[str, Any] = CPU_OPTIONS,
    reload: ReloadConfig | None = None,
    **engine: Any,
) -> Config:
    """A run whose engine takes prompts of 64 tokens and completions of 32; `engine` is of EngineConfig."""
    return Config(
        model="tiny:qwen3",
        run_dir="unused",
        prompts="colo.rl.tasks.letters",
        reward="colo.rl.tasks.letters_reward",
        num_steps=1,
        rollout=RolloutConfig(max_prompt_tokens=64, max_new_tokens=32),
        engine=EngineConfig(vllm=dict(vllm), **engine),
        reload=reload or ReloadConfig(),
        policy=PolicyConfig(compute_dtype=compute_dtype),
    )


def make_requests(step: int, *, max_new_tokens: int = 12, seed_offset: int = 0, num_slots: int = 2) -> list[Request]:
    """Two samples of each slot, of one prompt, seeded as a rollout's are."""
    return [
        Request(
            slot=slot,
            sample=sample,
            prompt_token_ids=PROMPT,
            seed=request_seed(0, step, slot, sample) + seed_offset,
            max_new_tokens=max_new_tokens,
        )
        for slot in range(num_slots)
        for sample in range(2)
    ]


def drained(engine: Engine) -> list[Completion]:
    """What comes of all that is in flight, stepped to its end."""
    while engine._requests:
        engine.step()
    return in_order(engine.finished())


def in_order(completions: list[Completion]) -> list[Completion]:
    """By slot and sample, as `make_requests` has them."""
    return sorted(completions, key=lambda completion: (completion.slot, completion.sample))


def greedy_tokens(engine: Engine) -> list[list[int]]:
    """What an awake engine completes greedily."""
    return [completion.token_ids for completion in _greedy(engine)]


def greedy_logprobs(engine: Engine) -> list[list[float]]:
    """The logprobs of `greedy_tokens`, which differ where weights do although the tokens are the same."""
    return [completion.logprobs for completion in _greedy(engine)]


def _greedy(engine: Engine) -> list[Completion]:
    requests = [
        Request(slot=slot, sample=0, prompt_token_ids=PROMPT[slot:], seed=1, max_new_tokens=16) for slot in range(3)
    ]
    return engine.generate(requests, GREEDY)


def held_by(engine: Engine) -> dict[str, Tensor]:
    """Copies of an engine's parameters and buffers, tied ones under each name."""
    model = engine._parts.model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def load_by_vllm(engine: Engine, whole: Iterable[tuple[str, Tensor]]) -> None:
    """Write whole tensors by the model's own loader, and pack what vLLM packs after the build."""
    with torch.no_grad():
        engine._parts.model.load_weights((name, tensor.to(engine._parts.dtype)) for name, tensor in whole)  # type: ignore[operator]
    repack_experts(engine._reloader.route.packed)


def differing(engine: Engine, others: dict[str, Tensor]) -> list[str]:
    """The engine's tensors that are not, bit for bit, those of an earlier `held_by`."""
    now = held_by(engine)
    assert now.keys() == others.keys()
    return [name for name, tensor in now.items() if not torch.equal(_bits(tensor), _bits(others[name]))]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # NaN equals NaN, and 0 is not -0


def refusal(call: Callable[[], Any]) -> str:
    """What an engine says when it refuses a call."""
    with pytest.raises(EngineStateError) as refused:
        call()
    return str(refused.value)


def gap_to_transformers(folder: Path, weights: dict[str, Tensor], completions: list[Completion]) -> float:
    """The largest |policy - engine| logprob, the policy being transformers with `weights`."""
    with tempfile.TemporaryDirectory() as moved:
        shutil.copytree(folder, moved, dirs_exist_ok=True)
        save_file(weights, Path(moved) / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(moved, dtype=torch.float32)
    gaps = []
    with torch.no_grad():
        for completion in completions:
            ids = torch.tensor([PROMPT + completion.token_ids])
            logprobs = model(ids).logits.float().log_softmax(-1)[0]
            expected = [logprobs[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(completion.token_ids)]
            gaps.append(max(abs(a - b) for a, b in zip(expected, completion.logprobs, strict=True)))
    return max(gaps)
