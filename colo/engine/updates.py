"""How an engine's weights change: whole, in chunks, or their label alone; each by its state, on every rank alike."""

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from colo.config import Config
from colo.engine import states
from colo.engine.build import VllmParts
from colo.engine.draft_weights import DraftWeights
from colo.engine.plan import engine_tensors
from colo.engine.proof import shorten
from colo.engine.reload import Reloader
from colo.engine.requests import Requests
from colo.engine.states import Call, EngineState
from colo.engine.timings import Timings
from colo.ranks import Ranks
from colo.types import NamedTensors


class WeightUpdates:
    """The half of the engine that takes the policy's weights."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        parts: VllmParts,
        model_folder: Path,
        stand_ins: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Plan and try the reload of an engine that was just built. Collective; arguments as for `Engine`."""
        self._ranks, self._parts = ranks, parts
        tensors = engine_tensors(parts.model)
        self._reloader = Reloader(parts, parts.model, tensors, stand_ins, model_folder, ranks, config.reload)
        self._draft = DraftWeights(parts, config, model_folder, ranks)
        self._requests = Requests(parts)
        self._timings = Timings()
        self._keeps_kv = False
        """Whether a pause left KV in place for what is in flight."""
        self.state: EngineState = states.after_build()

    def require_reloadable(self) -> None:
        """Refuse a model that cannot be reloaded in place, nor by vLLM's own reload. Collective.

        Raises:
            ValueError: on every rank.
        """
        lost = self._reloader.route.lost
        if lost:
            raise ValueError(
                f"model must be one that can be reloaded, got one where its own tensors, loaded again, change "
                f"{shorten(lost)}"
            )

    @property
    def weight_version(self) -> str:
        """The label of the weights that are loaded; empty while none is known."""
        return self.state.version

    def reload(self, weights: NamedTensors, version: str, *, draft_weights: NamedTensors | None = None) -> None:
        """Write the policy's weights into the engine in place, prove them and label them. Collective.

        Args:
            weights: Every tensor of the policy, whole or this rank's shards.
            version: Their label.
            draft_weights: The same of a draft that is trained; a frozen one is kept over every sleep.

        Raises:
            EngineStateError: asleep, inside an update, or with requests in flight.
            ValueError: the tensors are not those that the engine was built for: on every rank.
            RuntimeError: a rank failed, or an engine does not hold what the policy does: on every rank. The engine
                stays STALE until a reload passes.
        """
        self._check_quiet(Call.RELOAD)
        self.require_reloadable()
        self.state = states.stale(self.state, "a reload did not finish")
        self._timings.add(self._reloader.reload(weights))
        if draft_weights is not None:
            self._timings.add(self._draft.reload(draft_weights))
        else:
            self._draft.prove_kept()
        self._set_loaded(version)

    def start_weight_update(self) -> None:
        """Begin to write the policy's weights in chunks, in any order. Collective.

        Raises:
            EngineStateError: asleep, inside another update, or with requests in flight.
            RuntimeError: the model is reloaded whole, by vLLM's own reload.
        """
        self._check_quiet(Call.START_UPDATE)
        self.require_reloadable()
        self._reloader.start()
        self.state = states.updating(self.state)

    def update_weights(self, chunk: NamedTensors) -> None:
        """Write some of the policy's tensors; they may be freed or changed afterwards. Collective.

        What no chunk brings stays as it is. A chunk that fails ends the update: the engine is STALE.

        Raises:
            EngineStateError: no update was started.
            ValueError, RuntimeError: as `reload`.
        """
        states.check(self.state, Call.UPDATE)
        begun = self.state
        self.state = states.stale(self.state, "a weight update did not finish")
        self._reloader.update(chunk)
        self.state = begun

    def finish_weight_update(self, weight_version: str) -> None:
        """Prove the whole engine, what no chunk brought against its own last proof, and label it. Collective.

        Raises:
            EngineStateError: no update was started, or a tensor is missing that was lost since its last proof.
            RuntimeError: as `reload`.
        """
        states.check(self.state, Call.FINISH_UPDATE)
        told = self._ranks.gather(self._reloader.missing(), "looking for missing weights")
        missing = list(dict.fromkeys(name for names in told for name in names))
        if missing:
            raise states.unfinished(self.state, shorten(missing))
        self.state = states.stale(self.state, "a weight update did not finish")
        self._reloader.finish()
        self._draft.prove_kept()
        self._set_loaded(weight_version)

    def cancel_weight_update(self) -> None:
        """End an update without finishing it: the engine is STALE until a reload. Collective."""
        states.check(self.state, Call.CANCEL_UPDATE)
        self._reloader.forget()
        self.state = states.stale(self.state, "a weight update was cancelled")

    def drop_policy_views(self) -> None:
        """Forget where the policy's tensors lie, on every rank, so that they may be freed or moved. Collective.

        What a reload was handed is held until the next one or this. The next reload exchanges layouts and memory
        handles anew.
        """
        self._reloader.drop_policy_views()
        self._draft.drop_policy_views()

    def update_weight_version(self, label: str) -> None:
        """Change the label of the loaded weights, and nothing else."""
        states.check(self.state, Call.SET_VERSION, in_flight=len(self._requests))
        self._parts.llm.update_weight_version(label)
        if self.state.version:
            self.state = states.after_reload(self.state, label)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes: their KV is of other weights. Collective.

        Raises:
            RuntimeError: blocks are in use, so that vLLM kept them: on every rank, and the engine is STALE.
        """
        self._forget_prefixes(keeps_kv=False)

    def _forget_prefixes(self, *, keeps_kv: bool) -> None:
        """Let no request to come read a prefix that is cached now; `keeps_kv` leaves those in flight their own.

        Where some are, the cache cannot be reset: until the next time it is not read.
        """

        def reset() -> None:
            self._requests.reads_cache = not (keeps_kv and self._requests)
            if self._requests.reads_cache and not self._parts.llm.reset_prefix_cache(
                reset_running_requests=bool(self._requests)
            ):
                raise RuntimeError("the prefix cache was not reset: blocks are in use")

        before, self.state = self.state, states.stale(self.state, "the prefix cache was not reset")
        self._ranks.agreed(reset, "resetting the prefix cache")
        self.state = before

    def prove(self) -> str:
        """Show again that the engine holds what was last proven, after a change of the label, say. Collective.

        Returns:
            A digest of this rank's engine weights: equal where they are, byte for byte.

        Raises:
            EngineStateError: no weights are loaded.
            RuntimeError: they are others than at the last proof: on every rank, and the engine is STALE. Or the last
                reload was not proven, by `reload.proof`.
        """
        states.check(self.state, Call.PROVE)
        if not self._reloader.is_held:
            raise RuntimeError("there is no proof to compare with: reload.proof left out the last reload")
        before, self.state = self.state, states.stale(self.state, "a proof failed")
        digest = self._reloader.prove_again()
        self._draft.prove_kept()
        self.state = before
        return digest

    def _check_quiet(self, call: Call) -> None:
        """Refuse a call on every rank where one of them has requests in flight: replicas may have different ones."""
        states.check(self.state, call)
        counts = self._ranks.gather(len(self._requests), f"{call}: counting requests in flight")
        states.check(self.state, call, in_flight=max(counts))

    def _set_loaded(self, version: str) -> None:
        self._parts.llm.update_weight_version(version)
        if self.state.has_kv:
            if self._keeps_kv:  # of a pause, which is for all ranks
                counts = self._ranks.gather(len(self._requests), "counting requests that keep KV of older weights")
                num_kept = sum(counts[:: self._ranks.tensor_parallel_size])
                self._timings.add({"engine/stale_kv_requests": float(num_kept)} if num_kept else {})
            self._forget_prefixes(keeps_kv=self._keeps_kv)  # else what is in flight is computed again
        self.state = states.after_reload(self.state, version)
