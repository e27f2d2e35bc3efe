"""Build vLLM in this process, and the handful of its calls that differ between CPU and CUDA."""

import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from colo.config import Config, EngineConfig
from colo.engine.cpu import CpuSleep, prepare_cpu_backend
from colo.engine.drafts import DRAFT, kept_parameters, kept_patterns
from colo.engine.in_process import kept_process_state, map_before_freeing
from colo.engine.planned_kv import kv_arguments
from colo.ranks import Ranks
from colo.types import Request, Sampling

if TYPE_CHECKING:
    from vllm import LLM

logger = logging.getLogger(__name__)
MIN_CPU_BATCH = 4096
"""Tokens that a step on CPU may take, at least; a whole prompt must fit."""
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""Set before vLLM is imported, where the user has not set them: vLLM reads its environment once."""


@dataclass(kw_only=True)
class VllmParts:
    """A built vLLM and what we need of its insides."""

    llm: "LLM"
    model: nn.Module
    dtype: torch.dtype
    cpu_sleep: CpuSleep | None
    """Only on CPU, where vLLM's own sleep frees nothing."""
    draft: nn.Module | None = None
    """The draft that has weights; None without speculation, and where tokens are looked up (ngram)."""
    kept: dict[str, nn.Parameter] = field(default_factory=dict)
    """What a sleep at depth 2 keeps, by vLLM's name; a draft's own parameters are under `draft.`."""

    @property
    def preserved(self) -> list[str]:
        """The model's parameters that a sleep keeps, and that the policy leaves out."""
        return [name for name in self.kept if not name.startswith(DRAFT)]

    @property
    def has_random_weights(self) -> bool:
        """Whether vLLM made the weights up instead of reading them."""
        return self.llm.llm_engine.vllm_config.load_config.load_format == "dummy"

    @property
    def on_cpu(self) -> bool:
        """Whether this is vLLM's CPU backend."""
        return self.cpu_sleep is not None

    def sleep(self, depth: str) -> None:
        """Free the KV cache, and at depth 1 and 2 the weights. A request in flight is kept and computed again later."""
        if depth == "kv":
            self._free_kv()
        else:
            try:
                self.llm.sleep(level=int(depth), mode="keep")
            except AssertionError as error:
                self._require_asleep(error)
        if self.cpu_sleep:
            self.cpu_sleep.sleep(depth)

    def _free_kv(self) -> None:
        """Free the KV cache alone. vLLM's `release_kv_cache_memory` asks for an engine that has just idled a step."""
        self.pause(clear_cache=True)
        executor = self.llm.llm_engine.model_executor
        if self.cpu_sleep:
            executor.sleeping_tags.add("kv_cache")  # vLLM's own does the same on CPU, and raises
        else:
            executor.discard(("kv_cache",))

    def _require_asleep(self, error: AssertionError) -> None:
        """Go on where another process took memory while vLLM freed its own.

        vLLM 0.32.0 compares the card's free memory, which every process changes, after it has freed everything and
        before it notes that.
        """
        if "Memory usage increased after sleeping" not in str(error):
            raise error
        self.llm.llm_engine.model_executor.sleeping_tags |= {"weights", "kv_cache"}

    def wake(self, tag: str) -> None:
        """Map "weights" or "kv_cache" again; vLLM takes one tag at a time."""
        is_awake = self.llm.wake_up(tags=[tag])
        assert is_awake == (tag == "kv_cache"), f"vLLM says awake={is_awake} after waking {tag}"
        if self.cpu_sleep:
            self.cpu_sleep.wake_weights() if tag == "weights" else self.cpu_sleep.wake_kv()

    def shut_down(self) -> None:
        """End vLLM, and with it the default process group."""
        if not self.on_cpu:
            map_before_freeing()
        self.llm.llm_engine.engine_core.shutdown()

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        if not self.on_cpu:
            torch.cuda.synchronize()

    def add_request(self, request_id: str, request: Request, sampling: Sampling, *, reads_cache: bool) -> str:
        """Hand one request to vLLM; return the id that its output will carry."""
        from vllm import SamplingParams  # noqa: PLC0415 - vLLM reads its environment on import, so not before the build
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=request.max_new_tokens,
            seed=request.seed,  # never unseeded: those draw from the process's own generators, which ranks do not share
            logprobs=0,
            flat_logprobs=True,
            stop=list(sampling.stop) or None,
            detokenize=bool(sampling.stop),  # only stop strings need text while sampling
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=not reads_cache,
        )
        self.llm.llm_engine.add_request(request_id, {"prompt_token_ids": request.prompt_token_ids}, params)
        return request_id

    def output_so_far(self, request_id: str) -> Any:
        """What vLLM would put out for a request in flight if it were aborted now."""
        from vllm.v1.engine import FinishReason  # noqa: PLC0415 - as above

        processor = self.llm.llm_engine.output_processor
        (internal_id,) = processor.external_req_ids[request_id]
        return processor.request_states[internal_id].make_request_output(
            new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
        )

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests. A step that async scheduling began for them ends first, or the next one would wait for it."""
        self.llm.llm_engine.abort_request(request_ids, internal=False)
        core = self._core
        while core.batch_queue and not core.scheduler.has_requests():
            core.step_fn()

    def pause(self, *, clear_cache: bool) -> list[Any]:
        """Freeze what is in flight, and return what came of the last step; with `clear_cache` KV is computed again."""
        core = self._core
        core.pause_scheduler("keep", clear_cache=clear_cache)
        outputs = []
        # With async scheduling a batch may have run whose tokens nobody has fetched: they are of today's weights, and
        # vLLM labels tokens when they are fetched. A cleared cache drops them, to be sampled again.
        while core.batch_queue and not clear_cache:
            outputs += self.llm.llm_engine.step()
        return outputs

    def resume(self) -> None:
        """Go on with what is in flight."""
        self._core.resume_scheduler()

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]


def build_vllm(
    config: Config,
    ranks: Ranks,
    model_folder: Path,
    stand_ins: Iterable[tuple[str, torch.Tensor]],
    *,
    beside_policy: bool = True,
) -> VllmParts:
    """Build the engine of this rank's tensor-parallel group. Collective over all ranks of the launch.

    The process group must be up, since replicas are independent only then; the generators of random, numpy
    and torch come out as they went in.

    Args:
        config: The run's.
        ranks: Their process group is up.
        model_folder: What vLLM reads.
        stand_ins: Names and whole shapes of the model's tensors, for the size of the KV cache.
        beside_policy: Whether it leaves room for a policy and its optimizer.

    Raises:
        ValueError: on every rank: an option that this device or this model does not take.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # it logs before it reads its own variable
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    on_cpu = ranks.device.type == "cpu"
    memory = kv_arguments(config, ranks, model_folder, stand_ins, beside_policy=beside_policy)
    with kept_process_state():
        from vllm import LLM  # noqa: PLC0415 - slow, and it reads its environment on import: `import colo.train` must do without

        if on_cpu:
            prepare_cpu_backend()
        llm = LLM(str(model_folder), **(memory | _vllm_arguments(config, ranks, on_cpu)))
    worker = llm.llm_engine.model_executor.driver_worker
    model = worker.get_model()
    dtype = llm.llm_engine.vllm_config.model_config.dtype
    draft = worker.get_draft_model()
    kept = kept_parameters(model, draft, kept_patterns(config.engine))
    cpu_sleep = None
    if on_cpu:
        cpu_sleep = CpuSleep([model] if draft is None else [model, draft], _kv_caches(llm), kept.values())
    return VllmParts(llm=llm, model=model, dtype=dtype, cpu_sleep=cpu_sleep, draft=draft, kept=kept)


def folder_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a folder's safetensors files, one at a time, under its checkpoint name."""
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                yield name, file.get_tensor(name)


def _vllm_arguments(config: Config, ranks: Ranks, on_cpu: bool) -> dict[str, Any]:
    """vLLM's keyword arguments: ours, then what `engine.vllm` adds."""
    longest = config.engine.vllm.get("max_model_len", config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)
    arguments: dict[str, Any] = {
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": ranks.tensor_parallel_size,
        "dtype": config.policy.compute_dtype,
        "max_model_len": longest,
        "seed": config.seed + ranks.replica,
        "logprobs_mode": config.logprobs_mode,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        # vLLM takes back the draw of a seeded prompt that is prefilled in parts, which a CPU generator cannot do:
        # github.com/RBLN-SW/vllm-rbln/pull/1025 has the same on another backend.
        num_drafted = config.engine.speculative.get("num_speculative_tokens", 0)  # they take room beside the prompt
        most = max(MIN_CPU_BATCH, longest + num_drafted)
        whole_prompts = {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
        arguments |= whole_prompts
    else:
        arguments["enable_sleep_mode"] = True
    return arguments | config.engine.vllm | _draft_arguments(config.engine, on_cpu)


def _draft_arguments(config: EngineConfig, on_cpu: bool) -> dict[str, Any]:
    """What speculation adds: its own options, the counters that acceptance is read from, and what a sleep keeps."""
    if not config.speculative:
        return {}
    if on_cpu and config.speculative.get("method") == "ngram_gpu":
        raise ValueError("engine.speculative.method must be another one on CPU (ngram), got 'ngram_gpu'")
    return {
        "speculative_config": dict(config.speculative),
        "disable_log_stats": False,
        "sleep_preserve_parameter_names": kept_patterns(config),
    }


def _kv_caches(llm: "LLM") -> list[torch.Tensor]:
    """The KV cache tensors, through the attention layers that read them (the runners name them differently)."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    found = []
    for layer in layers:
        if "kv_cache" in vars(layer):
            cache = layer.kv_cache
            found += [
                tensor
                for tensor in (cache if isinstance(cache, (list, tuple)) else [cache])
                if isinstance(tensor, torch.Tensor)
            ]
    return found
