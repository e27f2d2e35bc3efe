"""Switches of an engine between asleep and awake, timed part by part on all ranks together."""

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colo.commands.timed import Clock
from colo.engine.engine import Engine
from colo.ranks import Ranks
from colo.types import Request, Sampling, TensorShard

RELOAD, LOAD_WEIGHTS = "reload", "load_weights"
"""Ways to write the weights: colo's, and one call of the model's own loader, which proves nothing."""
PARTS = {
    "sleep": "sleep",
    "wake_weights": "wake weights",
    "reload": "reload",
    "prove": "prove",
    "wake_kv": "wake KV",
    "reset": "reset",
}
"""Of a switch, in order; and what the table calls them."""
PROMPT = list(range(5, 45))
NUM_PROBES, PROBE_TOKENS = 3, 16
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, stop=())
Policy = list[tuple[str, TensorShard]]


@dataclass(kw_only=True)
class SwitchRow:
    """One depth, one time asleep and one way to write the weights; of each cycle the slowest rank's time."""

    depth: str
    idle_s: float
    way: str
    ms: dict[str, list[float]] = field(default_factory=dict)
    """By part, a value each cycle; from the call until the device was done."""

    def numbers(self, step_s: float | None) -> dict[str, Any]:
        """For the table and for JSON: medians, and the sum of them."""
        medians = {part: statistics.median(self.ms[part]) for part in PARTS if part in self.ms}
        total = sum(medians.values())
        return {
            "depth": self.depth,
            "idle_s": self.idle_s,
            "way": self.way,
            "ms": self.ms,
            "median_ms": medians,
            "sum_ms": total,
            "share_of_step": total / 1e3 / step_s if step_s else None,
        }


@dataclass(frozen=True, kw_only=True)
class DepthMemory:
    """What the device of the rank with most asleep has in use, in bytes; on CPU that process."""

    depth: str
    awake: int
    asleep: int

    @property
    def freed(self) -> int:
        """By the sleep."""
        return self.awake - self.asleep


class SwitchBench:
    """An engine and a policy's tensors that stay where they are, taken through one switch after the other."""

    def __init__(self, engine: Engine, dtype: torch.dtype, policy: Policy, ranks: Ranks) -> None:
        """Wake the engine with the policy's weights. Collective.

        Args:
            engine: Asleep.
            dtype: In which it computes.
            policy: Each of its tensors, in this rank's shards.
            ranks: Of the launch.
        """
        self._engine, self._dtype, self._policy, self._ranks = engine, dtype, policy, ranks
        self._clock = Clock(ranks, self._synchronize)
        spans = ranks.gather([(shard.start, shard.local.numel()) for _, shard in policy], "comparing the shards")
        self._spans = {name: [rank[number] for rank in spans] for number, (name, _) in enumerate(policy)}
        """(start, number of elements) of each rank's shard."""
        self.rows: list[SwitchRow] = []
        self.memory: list[DepthMemory] = []
        self.changed_by: list[str] = []
        """Depths after whose cycles greedy tokens were others."""
        self._wake(RELOAD)
        self._tokens = self._greedy_tokens()

    def measure(self, depth: str, idle_s: Sequence[float], num_cycles: int) -> None:
        """Rows for a depth: one for each time asleep, and one more for the other way. Collective."""
        self._cycle(depth, 0.0, RELOAD)  # kernels are compiled, and tables made, in the first
        awake, asleep = 0, 0
        for seconds, way in [*((seconds, RELOAD) for seconds in idle_s), (idle_s[0], LOAD_WEIGHTS)]:
            row = SwitchRow(depth=depth, idle_s=seconds, way=way)
            for _ in range(num_cycles):
                awake = self._used()
                times, asleep = self._cycle(depth, seconds, way)
                for part, ms in times.items():
                    row.ms.setdefault(part, []).append(ms)
            self.rows.append(row)
        self._wake(RELOAD)
        used = self._ranks.gather((asleep, awake), "comparing the ranks' memory")
        self.memory.append(DepthMemory(depth=depth, awake=max(used)[1], asleep=max(used)[0]))
        if self._ranks.any(self._greedy_tokens() != self._tokens, "comparing greedy tokens"):
            self.changed_by.append(depth)

    def numbers(self, step_s: float | None) -> dict[str, Any]:
        """For JSON."""
        return {
            "weights_bytes": self._engine.collective_rpc(_weights_bytes, read_only=True),
            "step_s": step_s,
            "rows": [row.numbers(step_s) for row in self.rows],
            "memory": [
                {"depth": one.depth, "awake_bytes": one.awake, "asleep_bytes": one.asleep, "freed_bytes": one.freed}
                for one in self.memory
            ],
            "changed_by": self.changed_by,
        }

    def _cycle(self, depth: str, idle_s: float, way: str) -> tuple[dict[str, float], int]:
        """Sleep and wake once: the slowest rank's milliseconds by part, and the bytes in use while asleep."""
        times = {"sleep": self._clock.once(lambda: self._engine.sleep(depth))}
        time.sleep(idle_s)
        asleep = self._used()
        times |= self._wake(way)
        told = self._ranks.gather(times, "timing a switch")
        return {part: max(rank[part] for rank in told) for part in times}, asleep

    def _wake(self, way: str) -> dict[str, float]:
        """This rank's milliseconds by part."""
        engine, once = self._engine, self._clock.once
        times = {"wake_weights": once(lambda: engine.wake_up(["weights"]))}
        engine.take_metrics()
        if way == RELOAD:
            whole_ms = once(lambda: engine.reload(self._policy, version="bench"))
            times["prove"] = engine.take_metrics()["switch/prove_s"] * 1e3
            times["reload"] = whole_ms - times["prove"]
        else:
            times["reload"] = self._load_weights()
        times["wake_kv"] = once(lambda: engine.wake_up(["kv_cache"]))
        times["reset"] = once(engine.reset_prefix_cache)
        return times

    def _load_weights(self) -> float:
        """One call of the model's own loader over all tensors; those that ranks share are made whole one by one."""

        def load(worker: Any) -> float:
            with torch.no_grad():
                return self._clock.once(lambda: worker.get_model().load_weights(self._whole()))

        return self._engine.collective_rpc(load)

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, shard in self._policy:
            tensor = _gathered(shard, self._spans[name])
            casts = tensor.is_floating_point() and tensor.dim() > 1  # vLLM warns where it has to cast a matrix itself
            yield name, tensor.to(self._dtype) if casts else tensor

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize()

    def _used(self) -> int:
        """Bytes in use on this rank's card, by everybody; on CPU by this process."""
        if self._ranks.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            return total - free
        (resident,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")]
        return int(resident.split()[1]) << 10

    def _greedy_tokens(self) -> list[list[int]]:
        requests = [
            Request(slot=slot, sample=0, prompt_token_ids=PROMPT[slot:], seed=1, max_new_tokens=PROBE_TOKENS)
            for slot in range(NUM_PROBES)
        ]
        return [completion.token_ids for completion in self._engine.generate(requests, GREEDY)]


def _weights_bytes(worker: Any) -> int:
    """Of the engine's model on this rank, tied weights once."""
    return sum(parameter.nbytes for parameter in worker.get_model().parameters())


def _gathered(shard: TensorShard, spans: list[tuple[int, int]]) -> Tensor:
    """The whole tensor, from each rank's (start, number of elements). Collective, unless all ranks have all of it."""
    if set(spans) == {(0, math.prod(shard.shape))}:
        return shard.local.view(shard.shape)
    own = shard.local.new_zeros(max(length for _, length in spans))  # what is gathered must be of one length
    own[: shard.local.numel()] = shard.local.reshape(-1)
    parts = [torch.empty_like(own) for _ in spans]
    dist.all_gather(parts, own)
    return torch.cat([part[:length] for part, (_, length) in zip(parts, spans, strict=True)]).view(shard.shape)
