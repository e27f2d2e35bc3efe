"""The reload: the policy's weights into the engine, in place, by a plan that was tried, and proven after each time."""

import hashlib
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from colo.config import ReloadConfig
from colo.engine.build import VllmParts
from colo.engine.cpu import repack_experts
from colo.engine.handed import take
from colo.engine.peers import PolicyShards
from colo.engine.plan import ReloadPlan, record_plan
from colo.engine.proof import EngineSums, shorten
from colo.engine.replay import Replay
from colo.engine.trial import Route, find_route, names_in
from colo.ranks import Ranks
from colo.types import NamedTensors, TensorShard

logger = logging.getLogger(__name__)


class Reloader:
    """Writes the policy's tensors into one of vLLM's models, at once or in chunks, and proves what lies there after."""

    def __init__(
        self,
        parts: VllmParts,
        model: nn.Module,
        targets: dict[str, Tensor],
        stand_ins: Iterable[tuple[str, Tensor]],
        folder: Path,
        ranks: Ranks,
        options: ReloadConfig,
    ) -> None:
        """Record the plan and try it. Collective; the engine is mapped, and holds what vLLM read from `folder`.

        Args:
            parts: The engine.
            model: Its model, or its draft.
            targets: The tensors of it to write, as for `record_plan`.
            stand_ins: What the policy will hand over: names, whole shapes and dtypes, as tensors on meta.
            folder: Where vLLM read the model from.
            ranks: Of the launch.
            options: The recipe's.
        """
        self._parts, self._ranks, self._options = parts, ranks, options
        stood_in = list(stand_ins)
        self._sources = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stood_in}
        self._targets = targets
        self.plan = record_plan(model, targets, stood_in, parts.dtype, parts.preserved)
        self._plans: list[ReloadPlan] = ranks.gather_in_group(self.plan, "exchanging the reload plans")
        self.route: Route = find_route(parts, model, self.plan, self._targets, folder, ranks)
        self._sums = EngineSums(self.plan, self._targets)
        self._shards = PolicyShards(ranks, options.transport)
        self._replay: Replay | None = None
        self._is_proven_once = False
        self._is_suspect = False
        """The last reload failed, perhaps for views that were not what they seemed: the next one makes them anew."""
        self.is_held = False
        """Whether `_held` is of what the engine holds now."""
        num_copies = len(self.plan.copies)
        self._loaded = np.zeros(num_copies, dtype=bool)
        """Which copies lie in the engine: not after the build or a wake from level 2."""
        self._held = np.zeros(num_copies, dtype=np.int64)
        """The engine's sum of each copy at the last proof, packed as the engine has it."""
        self._chunked: dict[int, int] = {}
        """In an update by chunks: the policy's sum of each copy that was written."""
        logger.info(
            "reload plan: %d slices of %d tensors, %d constants, %d tensors kept%s",
            num_copies,
            len(self._sources),
            len(self.plan.fills),
            len(self.plan.kept),
            f"; no use for {shorten(self.plan.unused)}" if self.plan.unused else "",
        )

    def reload(self, weights: NamedTensors) -> dict[str, float]:
        """Write all of the policy's tensors and prove it. Collective.

        Returns:
            This rank's seconds and bytes, by metric name.

        Raises:
            ValueError: names, shapes or dtypes are not those of the stand-ins: on every rank.
            RuntimeError: a rank failed, or its engine does not hold what the policy handed over: on every rank.
        """
        started = time.perf_counter()
        handed = take(weights, self._sources, self._ranks, is_chunk=False)
        if self._is_suspect:
            self.drop_policy_views()
        self._is_suspect = True
        if self._shards.refresh(handed) or self._replay is None:
            self._replay = None  # its views are of where the tensors lay
            self._replay = self._bound(self._shards, handed)
        self.forget()
        sums, prove_s = self._write(self._replay, handed)
        prove_s += self._settle(sums, range(len(sums)))
        self._is_suspect = False
        moved = self._replay.bytes
        return {
            "switch/reload_s": time.perf_counter() - started - prove_s,
            "switch/prove_s": prove_s,
            "reload/bytes": float(moved.total),
            "reload/peer_bytes": float(moved.peer),
            "reload/gather_bytes": float(moved.gather),
            "reload/extra_bytes": float(self._replay.extra_bytes),
        }

    def forget(self) -> None:
        """The engine's weights are lost, or about to be overwritten: none counts as loaded."""
        self._loaded[:] = False
        self.is_held = False
        self._chunked = {}

    def keep_as_is(self) -> None:
        """Take what the policy does not bring, such as calibrated scales, as it is now for what is to be kept."""
        self._sums.keep_as_is()
        if not self._proves:
            self.forget()  # no proof would see what else was written

    def drop_policy_views(self) -> None:
        """Forget every view of the policy's tensors. Collective."""
        self._replay = None
        self._shards.drop()

    def start(self) -> None:
        """Begin an update by chunks.

        Raises:
            RuntimeError: the model takes vLLM's own reload, which wants all tensors at once.
        """
        if self.route.by_bracket:
            names = shorten([name or "every parameter" for name in sorted(self.route.by_bracket)])
            raise RuntimeError(f"this model is reloaded whole, not in chunks: {names} cannot be written in place")
        self._chunked = {}

    def update(self, chunk: NamedTensors) -> None:
        """Write some of the policy's tensors; the caller may free them afterwards. Collective.

        Raises:
            ValueError, RuntimeError: as `reload`.
        """
        handed = take(chunk, self._sources, self._ranks, is_chunk=True)
        shards = PolicyShards(self._ranks, self._options.transport)
        shards.refresh(handed)
        replay = self._bound(shards, handed)
        numbers = [number for number, copy in enumerate(self.plan.copies) if copy.source in handed]
        self._loaded[numbers] = self.is_held = False  # before the write, which may fail half way
        sums, _ = self._write(replay, handed)
        self._chunked |= {number: int(sums[number]) for number in numbers}
        shards.drop()

    def missing(self) -> list[str]:
        """The sources that an update by chunks must still bring before it can be finished."""
        told = [
            copy.source
            for number, copy in enumerate(self.plan.copies)
            if number not in self._chunked and (not self._loaded[number] or self._is_packed_in_part(copy.target))
        ]
        return list(dict.fromkeys(told))

    def finish(self) -> None:
        """Prove the whole engine after an update by chunks: what no chunk wrote is as it was. Collective.

        Raises:
            RuntimeError: as `reload`.
        """
        sums = self._held.copy()
        for number, value in self._chunked.items():
            sums[number] = value
        self.plan.write_fills(self._targets)
        self._settle(sums, self._chunked)
        self._chunked = {}

    def prove_again(self) -> str:
        """Compare the engine with its last proof. Collective.

        Returns:
            A digest of this rank's sums.

        Raises:
            RuntimeError: they differ: on every rank.
        """

        def compare() -> str:
            held, wrong = self._sums.differing(self._held, set())
            if wrong:
                raise RuntimeError(f"the engine does not hold what was proven: {shorten(wrong)}")
            return hashlib.sha256(held.tobytes()).hexdigest()

        return self._ranks.agreed(compare, "proving the engine again")[self._ranks.rank]

    @property
    def _proves(self) -> bool:
        return self._options.proof == "every" or (self._options.proof == "first" and not self._is_proven_once)

    def _bound(self, shards: PolicyShards, handed: dict[str, TensorShard]) -> Replay:
        bucket_bytes, made = self._options.bucket_mib << 20, []

        def bind() -> None:
            made.append(Replay(self._ranks, self._plans, self._targets, shards, list(handed), bucket_bytes))

        self._ranks.agreed(bind, "reload: planning the copies")
        return made[0]

    def _write(self, replay: Replay, handed: dict[str, TensorShard]) -> tuple[np.ndarray, float]:
        """Copy, and sum what was read. Collective.

        The gather before it is the barrier that keeps writers off; the one at its end, in which a rank that failed
        takes part too, lets them on again.

        Returns:
            The policy's sum of each copy into this rank's engine (zeros where nothing is proven), and the seconds that
            summing took.
        """
        failure = replay.write_by_bracket(self._parts, self._sources) if self.route.by_bracket else replay.pull()
        seconds = 0.0
        own = np.zeros(len(self.plan.copies), dtype=np.int64)

        def copy_and_sum() -> list[bytes]:
            nonlocal seconds, own
            if failure:
                raise failure
            if not self.route.by_bracket:
                replay.copy()
                self.plan.write_fills(self._targets)
            self._parts.synchronize()
            started = time.perf_counter()
            spread: list[np.ndarray] = []
            if self._proves:
                spread, own = replay.source_sums(handed)
            seconds = time.perf_counter() - started
            return [sums.tobytes() for sums in spread]

        told = self._ranks.agreed(copy_and_sum, "reload")
        for sums in told:
            if sums:
                own = own + np.frombuffer(sums[self._ranks.group_rank], dtype=np.int64)
        return own, seconds

    def _settle(self, sums: np.ndarray, numbers: Iterable[int]) -> float:
        """Prove that the engine holds `sums`, and make what was just written ready to use. Collective.

        Returns:
            The seconds that the proof took on this rank.
        """
        started = time.perf_counter()
        proves = self._proves

        def compare() -> None:
            held, wrong = self._sums.differing(sums, set(self.route.by_bracket))
            if wrong:
                raise RuntimeError(f"the engine does not hold what the policy handed over: {shorten(wrong)}")
            self._held = held[: len(sums)]

        if proves:
            self._ranks.agreed(compare, "proving the reload")
            self._is_proven_once = self.is_held = True
        seconds = time.perf_counter() - started
        touched = {self.plan.copies[number].target for number in numbers}
        packed = [module for module in self.route.packed if touched & self._names_in(module)]
        repack_experts(packed)
        if packed and proves:
            self._held = self._sums.now()[: len(sums)]
        self._loaded[list(numbers)] = True
        return seconds

    def _is_packed_in_part(self, target: str) -> bool:
        """Whether a chunk wrote into the packed module of `target`, whose other tensors it left packed."""
        touched = {self.plan.copies[number].target for number in self._chunked}
        return any(target in names and touched & names for names in map(self._names_in, self.route.packed))

    def _names_in(self, module: nn.Module) -> set[str]:
        return set(names_in(module, self._targets))
