"""How an engine generates: whole rollouts, or request by request, with pauses; each by its state."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from colo.config import Config
from colo.engine import states
from colo.engine.build import VllmParts
from colo.engine.drafts import DraftWatch
from colo.engine.states import Call
from colo.engine.updates import WeightUpdates
from colo.ranks import Ranks
from colo.rl.generator import require_same_tokens
from colo.types import Completion, Request, Sampling

PAUSE_MODES = ("abort", "wait", "keep")


class Generation(WeightUpdates):
    """The half of the engine that samples."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        parts: VllmParts,
        model_folder: Path,
        stand_ins: Iterable[tuple[str, Tensor]],
    ) -> None:
        """As `WeightUpdates`."""
        super().__init__(config, ranks, parts, model_folder, stand_ins)
        self._watch = None
        if config.engine.speculative:
            self._watch = DraftWatch(parts.llm, config.engine.draft_floor, has_weights=parts.draft is not None)

    def abort(self, request_ids: list[str] | None = None) -> list[Completion]:
        """Drop requests in flight, by default all, without a pause.

        Returns:
            What they have so far, with its logprobs and spans and the finish reason "abort".
        """
        states.check(self.state, Call.ABORT)
        return list(self._requests.abort(request_ids).values())

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Stop generating until `resume_generation`: `submit` queues, `step` does nothing, `generate` is refused.

        Args:
            mode: "abort" drops what is in flight: what it has so far comes out of `finished`. "wait" finishes it first.
                "keep" freezes it: it goes on after the resume, also over a reload and a sleep.
            clear_cache: Forget the KV cache; what is kept is computed again. Without, a reload leaves KV of the old
                weights in use, which `engine/stale_kv_requests` counts.

        Raises:
            EngineStateError: "wait" where no step is legal; any where the engine is broken.
            ValueError: no such mode.
        """
        states.check(self.state, Call.PAUSE)
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        if mode == "wait" and self._requests:
            states.check(self.state, Call.STEP)
            if self.state.paused:
                raise states.refusal(
                    self.state, Call.PAUSE, "it is paused, so that nothing would finish", f"call {Call.RESUME}"
                )
        if mode == "abort":
            self._requests.abort_all()
        while mode == "wait" and self._requests:
            self.step()
        if self.state.has_kv:
            self._requests.freeze(clear_cache=clear_cache)
        self._keeps_kv = not clear_cache
        self.state = states.paused(self.state, is_paused=True)

    def resume_generation(self) -> None:
        """Go on after `pause_generation`; while the engine sleeps, from its wake on."""
        states.check(self.state, Call.RESUME)
        if self.state.has_kv:
            self._parts.resume()
        self._keeps_kv = False
        self.state = states.paused(self.state, is_paused=False)

    def is_paused(self) -> bool:
        """True between `pause_generation` and `resume_generation`."""
        return self.state.paused

    def require_ready(self) -> None:
        """Refuse what cannot generate now.

        Raises:
            EngineStateError: the engine does not hold proven weights, or is paused.
        """
        states.check(self.state, Call.GENERATE)

    def generate(self, requests: list[Request], sampling: Sampling, what: str = "rollout") -> list[Completion]:
        """Sample every request to its end. Collective over the tensor-parallel group.

        Args:
            requests: The same on each rank of the group.
            sampling: For all of them.
            what: What other ranks are told that this one is doing.

        Returns:
            One completion per request, in the order of `requests`.

        Raises:
            EngineStateError: the engine does not hold proven weights, or is paused.
            RuntimeError: the ranks of the group sampled different tokens, or a logprob is missing.
        """
        self.require_ready()
        ids = [self.submit(request, sampling) for request in requests]
        done = 0
        while self._requests:
            done += self.step()
            self._ranks.report(what, f"{done} of {len(requests)} done")
        completions = self._requests.take(ids)  # others were submitted by hand, and are left to `finished`
        require_same_tokens(completions, self._ranks, what)
        return completions

    def submit(self, request: Request, sampling: Sampling) -> str:
        """Queue one request; return the id that `abort` takes."""
        states.check(self.state, Call.SUBMIT)
        if self._watch:
            self._watch.submit(sampling, num_in_flight=len(self._requests))
        return self._requests.submit(request, sampling)

    def step(self) -> int:
        """One scheduler step; return how many requests it finished. While paused it does nothing."""
        states.check(self.state, Call.STEP)
        return 0 if self.state.paused else self._requests.step()

    def finished(self) -> list[Completion]:
        """The completions that finished since the last call."""
        return self._requests.finished()

    @contextmanager
    def _draft_watched(self) -> Iterator[None]:
        if self._watch is None:
            yield
            return
        self._watch.start()
        yield
        self._timings.add(self._watch.finish(self._ranks))
