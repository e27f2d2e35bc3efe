"""Each way to write a policy's tensors into an engine, alone: what a benchmark of the reload compares."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from colo.config import Config
from colo.engine.build import build_vllm
from colo.engine.cpu import repack_experts
from colo.engine.peers import PolicyShards
from colo.engine.plan import engine_tensors
from colo.engine.proof import EngineSums, shorten
from colo.engine.reload import Reloader
from colo.engine.replay import Replay
from colo.engine.trial import write_by_bracket
from colo.ranks import Ranks
from colo.types import TensorShard


class ReloadWays:
    """An engine, mapped since its build, that takes one policy's tensors by whichever way is called.

    Each way is collective, and returns once the device was asked for everything; `synchronize` waits for it.
    """

    def __init__(
        self, config: Config, ranks: Ranks, model_folder: Path, stand_ins: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Build the engine, plan and try its reload. Collective; arguments as for `Engine`."""
        self._ranks, self._config = ranks, config
        stand_ins = list(stand_ins)
        self._parts = build_vllm(config, ranks, model_folder, stand_ins)
        self._targets = engine_tensors(self._parts.model)
        self._reloader = Reloader(
            self._parts, self._parts.model, self._targets, stand_ins, model_folder, ranks, config.reload
        )
        self._plan = self._reloader.plan
        self._sums = EngineSums(self._plan, self._targets)
        self._shards = PolicyShards(ranks, config.reload.transport)
        self._handed: dict[str, TensorShard] = {}
        self._replay: Replay | None = None

    def bind(self, weights: Iterable[tuple[str, TensorShard]]) -> None:
        """Take the policy's tensors, which stay where they are from now on. Collective."""
        self._handed = dict(weights)
        self._shards.refresh(self._handed)
        plans = self._ranks.gather_in_group(self._plan, "exchanging the reload plans")
        bucket_bytes = self._config.reload.bucket_mib << 20
        self._replay = Replay(self._ranks, plans, self._targets, self._shards, list(self._handed), bucket_bytes)

    def describe(self) -> dict[str, int | str]:
        """What a reload of this rank's engine moves, and how: counts, bytes, and how other ranks are read."""
        copied, read = 0, 0
        for copy in self._plan.copies:
            copied += copy.places.numel * self._targets[copy.target].element_size()
            read += copy.read.numel * self._handed[copy.source].local.element_size()
        filled = sum(fill.places.numel * self._targets[fill.target].element_size() for fill in self._plan.fills)
        return {
            "num_tensors": len(self._plan.sources),
            "num_slices": len(self._plan.copies),
            "num_constants": len(self._plan.fills),
            "num_kept": len(self._plan.kept),
            "read_bytes": read,
            "written_bytes": copied + filled,
            "held_bytes": sum(tensor.nbytes for tensor in self._targets.values()),
            "how_ranks_are_read": self._shards.describe(),
        }

    @property
    def hindrance(self) -> str:
        """Why the plan cannot be replayed on this model; empty where it can."""
        route = self._reloader.route
        if route.lost:
            return f"no way writes {shorten(route.lost)} rightly"
        reasons = [f"{name or 'every parameter'}: {why}" for name, why in sorted(route.by_bracket.items())]
        return f"it takes vLLM's reload_weights ({shorten(reasons)})" if reasons else ""

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
        self._parts.synchronize()

    def replay(self) -> None:
        """The plan's copies and constants, without the proof.

        Raises:
            RuntimeError: this model takes another way.
        """
        if self.hindrance:
            raise RuntimeError(self.hindrance)
        failure = self._bound.pull()
        if failure:
            raise failure
        self._bound.copy()
        self._plan.write_fills(self._targets)

    def sum_policy(self) -> None:
        """The half of a proof that reads what the policy handed over."""
        self._bound.source_sums(self._handed)

    def sum_engine(self) -> None:
        """The half of a proof that reads what the engine holds."""
        self._sums.now()

    def sum_both(self) -> None:
        """Both halves."""
        self.sum_policy()
        self.sum_engine()

    def reload(self) -> dict[str, float]:
        """What `Engine.reload` does: its metrics."""
        return self._reloader.reload(self._handed.items())

    def load_weights(self) -> None:
        """One call of the model's own loader over all tensors; those that ranks share are made whole one by one."""
        with torch.no_grad():
            self._load(self._whole())

    def load_weights_one_by_one(self) -> None:
        """One call of the loader for each tensor."""
        with torch.no_grad():
            for item in self._whole():
                self._load([item])

    def reload_weights(self) -> None:
        """vLLM's layerwise reload over all tensors."""
        write_by_bracket(self._parts, self._whole(), self._plan, self._targets)

    def differing(self) -> list[str]:
        """The engine's tensors that a replay leaves other than `load_weights` does, bit for bit; of any rank."""
        loaded = self._after(self.load_weights)
        replayed = self._after(self.replay)
        wrong = [name for name, tensor in loaded.items() if not torch.equal(_bytes(tensor), _bytes(replayed[name]))]
        told = self._ranks.gather(wrong, "comparing the engines")
        return sorted({name for names in told for name in names})

    def close(self) -> None:
        """Shut vLLM down. Collective, last of all."""
        self._parts.llm.llm_engine.engine_core.shutdown()

    @property
    def _bound(self) -> Replay:
        assert self._replay is not None, "bind must come before the ways"
        return self._replay

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._parts.model.load_weights(weights)  # type: ignore[operator]

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._handed:
            tensor = self._bound.whole(name)
            casts = tensor.is_floating_point() and tensor.dim() > 1  # vLLM warns where it has to cast a matrix itself
            yield name, tensor.to(self._parts.dtype) if casts else tensor

    def _after(self, way: Callable[[], None]) -> dict[str, Tensor]:
        """Copies of the tensors that a reload writes, after one way has written over what is true of no policy."""
        names = {write.target for write in [*self._plan.copies, *self._plan.fills]}
        for name in names:
            tensor = self._targets[name]
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        way()
        repack_experts(self._reloader.route.packed)
        self.synchronize()
        return {name: self._targets[name].clone() for name in names}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
