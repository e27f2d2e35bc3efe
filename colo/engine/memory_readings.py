"""What a rank holds now and held at a peak, by part: read from storages and the kernel on CPU, from three allocators
on CUDA."""

from collections.abc import Mapping
from pathlib import Path

import torch

from colo.engine.cpu import CpuSleep, trim_heap
from colo.engine.memory_baseline import Baseline, resident_bytes
from colo.engine.memory_table import POLICY_PARTS, closed

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to `CLEAR_REFS`: VmHWM starts anew from what is in memory now."""


class CpuMemory:
    """Of this process on CPU: what is in memory (RSS), by the storages that are known.

    The context is what this process had when the engine was built and no known storage held: the interpreter,
    libraries, vLLM's own buffers. Shared memory that is mapped here beyond the policy's own part (other ranks' shards,
    which a reload reads) counts as `other_processes`: it is in every rank's RSS and once in memory.
    """

    def __init__(self, sleep: CpuSleep, baseline: Baseline) -> None:
        """Right after the build; the policy has nothing yet."""
        self._sleep = sleep
        trim_heap()
        self._fixed = {"context": 0, "communication": baseline.communication}
        self._fixed["context"] = self.now({})["unattributed"]
        self._can_reset = True

    def now(self, policy: Mapping[str, int]) -> dict[str, int]:
        """All parts and the total."""
        resident = resident_bytes()
        return closed(resident["VmRSS"], self._known(policy, resident["RssShmem"]))

    def start_peak(self, policy: Mapping[str, int]) -> None:
        """Begin to watch for the peak. What is unattributed now stays so."""
        # The kernel may keep the file from this process; then the peak is taken to be at the end of the update.
        try:
            CLEAR_REFS.write_text(RESET_PEAK)
        except OSError:
            self._can_reset = False
        self._before = max(0, self.now(policy)["unattributed"])

    def at_peak(self, policy: Mapping[str, int]) -> dict[str, int]:
        """All parts and the total at the peak since `start_peak`; `policy` is what it held at the most."""
        resident = resident_bytes()
        total = resident["VmHWM" if self._can_reset else "VmRSS"]
        parts = self._known(dict(policy) | {"gradients": 0}, resident["RssShmem"])
        rest = max(0, total - sum(parts.values()) - self._before)
        return closed(total, parts | _split(rest, policy))

    def settle(self, unattributed: int) -> None:
        """Nothing: what the heap keeps after an update would look like context."""

    def _known(self, policy: Mapping[str, int], shared: int) -> dict[str, int]:
        weights, kv_cache = self._sleep.mapped
        return {
            "engine_weights": sum(tensor.nbytes for tensor in weights),
            "kv_cache": sum(tensor.nbytes for tensor in kv_cache),
            **policy,
            **self._fixed,
            "other_processes": max(0, shared - policy.get("policy_parameters", 0)),
        }


def _split(rest: int, policy: Mapping[str, int]) -> dict[str, int]:
    """What the peak held beyond the known, as gradients and activations.

    The gradients are those at the end of a backward pass, as far as there is room for them: a peak before that end
    holds fewer, and then the activations are taken too small by as much.
    """
    gradients = min(policy.get("gradients", 0), rest)
    return {"gradients": gradients, "activations": rest - gradients}


class CudaMemory:
    """Of this rank's card: what the driver counts as used, by torch's statistics and vLLM's own allocations.

    vLLM's weights, KV cache and a few buffers lie in memory pools whose pages it unmaps itself. torch counts those
    segments as if they were mapped, and those of captured CUDA graphs too; one snapshot after the build finds how much
    of torch's statistics is theirs, which does not change any more. The rest is the default pool: what the engine has
    there after the build are its buffers, what the policy says are its parts, and the rest are activations, or what
    somebody keeps. Kernels are loaded when they are first used: the memory that grows outside of all allocators until
    the build is over is context; until the first update is over it is that too, or communication where there are
    several ranks, since their first collectives come in between. What grows later is unattributed.
    """

    def __init__(self, baseline: Baseline) -> None:
        """Right after the build; the policy has nothing on the card yet."""
        from vllm.device_allocator.cumem import CuMemAllocator  # noqa: PLC0415 - it reads its environment on import

        self._allocations = CuMemAllocator.get_instance().pointer_to_data
        pools = CuMemAllocator.get_instance().allocator_and_pools.values()
        sleeping_pools = {tuple(pool.id) for entries in pools for pool, _ in entries}
        in_default, in_graphs = [0, 0], 0
        for segment in torch.cuda.memory_snapshot():
            if segment["device"] != torch.cuda.current_device():
                continue
            pool = tuple(segment["segment_pool_id"])
            if pool == (0, 0) and segment["address"] not in self._allocations:
                in_default[0] += segment["total_size"]
                in_default[1] += segment["allocated_size"]
            elif pool not in sleeping_pools and segment["address"] not in self._allocations:
                in_graphs += segment["total_size"]
        reserved, allocated = self._statistics("current")
        self._elsewhere = (reserved - in_default[0], allocated - in_default[1])
        """Of torch's statistics: reserved and allocated bytes of other pools than the default one."""
        self._graphs = in_graphs
        self._buffers = in_default[1]
        self._fixed = {
            "context": baseline.context,
            "communication": baseline.communication,
            "other_processes": baseline.other_processes,
        }
        self._grows = "context"
        self.settle(self.now({})["unattributed"])
        self._grows = "communication" if baseline.num_ranks > 1 else "context"

    def now(self, policy: Mapping[str, int]) -> dict[str, int]:
        """All parts and the total."""
        free, total = torch.cuda.mem_get_info()
        reserved, allocated = self._default("current")
        parts = self._known(policy) | {"torch_cache": reserved - allocated}
        rest = allocated - self._buffers - sum(policy.get(part, 0) for part in POLICY_PARTS)
        return closed(total - free, parts | {"activations": max(0, rest)})

    def start_peak(self, policy: Mapping[str, int]) -> None:
        """Begin to watch for the peak."""
        del policy  # as of `CpuMemory`
        torch.cuda.reset_peak_memory_stats()

    def at_peak(self, policy: Mapping[str, int]) -> dict[str, int]:
        """All parts and the total at the peak since `start_peak`; `policy` is what it held at the most.

        The total is what is used now and what torch had reserved more of at its peak.
        """
        free, total = torch.cuda.mem_get_info()
        reserved, allocated = self._default("peak")
        used = total - free + reserved - self._default("current")[0]
        parts = self._known(policy) | {"torch_cache": reserved - allocated}
        held = sum(policy.get(part, 0) for part in POLICY_PARTS if part != "gradients")
        return closed(used, parts | _split(max(0, allocated - self._buffers - held), policy))

    def settle(self, unattributed: int) -> None:
        """Count what has grown outside of all allocators so far as context or communication."""
        self._fixed[self._grows] += max(0, unattributed)

    def _known(self, policy: Mapping[str, int]) -> dict[str, int]:
        mapped: dict[str, int] = {}
        for allocation in self._allocations.values():
            if not allocation.is_asleep:
                mapped[allocation.tag] = mapped.get(allocation.tag, 0) + allocation.handle[1]
        weights, kv_cache, graphs = (mapped.pop(tag, 0) for tag in ("weights", "kv_cache", "cudagraph"))
        return {
            "engine_weights": weights,
            "kv_cache": kv_cache,
            "cuda_graphs": self._graphs + graphs,
            "engine_buffers": self._buffers + sum(mapped.values()),  # of them the tags runtime and workspace
            **policy,
            **self._fixed,
        }

    def _default(self, when: str) -> tuple[int, int]:
        """Reserved and allocated bytes of the default pool."""
        reserved, allocated = self._statistics(when)
        return reserved - self._elsewhere[0], allocated - self._elsewhere[1]

    def _statistics(self, when: str) -> tuple[int, int]:
        """Reserved and allocated bytes of all pools, now ("current") or at the most since `start_peak` ("peak")."""
        statistics = torch.cuda.memory_stats()
        return statistics[f"reserved_bytes.all.{when}"], statistics[f"allocated_bytes.all.{when}"]
