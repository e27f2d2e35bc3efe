"""The vLLM engine in this process: build, generate, awake, sleep."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from colo.config import Config
from colo.engine import states
from colo.engine.build import build_vllm
from colo.engine.drafts import DraftWatch
from colo.engine.states import Call
from colo.engine.updates import WeightUpdates
from colo.ranks import Ranks
from colo.rl.generator import require_same_tokens
from colo.types import Completion, NamedTensors, Request, Sampling

PAUSE_MODES = ("abort", "wait", "keep")


class Engine(WeightUpdates):
    """One vLLM engine, spread over this rank's tensor-parallel group, asleep while the policy updates.

    Every method is for all ranks of the launch to call together, or is refused on each of them.
    """

    def __init__(
        self, config: Config, ranks: Ranks, model_folder: Path, stand_ins: Iterable[tuple[str, Tensor]]
    ) -> None:
        """Build the engine, plan and try its reload, and put it to sleep. Collective.

        Args:
            config: The run's.
            ranks: Their process group is up, and every rank builds now.
            model_folder: What vLLM reads.
            stand_ins: What will be handed over at each reload: checkpoint names, whole shapes and dtypes, on meta.
        """
        parts = build_vllm(config, ranks, model_folder)
        super().__init__(config, ranks, parts, model_folder, stand_ins)
        self._depth = config.engine.sleep
        self._watch = None
        if config.engine.speculative:
            self._watch = DraftWatch(parts.llm, config.engine.draft_floor, has_weights=parts.draft is not None)
        self.sleep()
        self._timings.take()  # the sleep after the build is part of no step

    def is_sleeping(self) -> bool:
        """True while the weights are freed."""
        return self.state.phase is states.Phase.ASLEEP

    @contextmanager
    def awake(
        self, weights: NamedTensors, version: str, *, draft_weights: NamedTensors | None = None
    ) -> Iterator[None]:
        """Inside, the engine generates with `weights` and has the free memory; outside, the policy has it. Collective.

        Args:
            weights: Every tensor of the policy, by checkpoint name, in one order on every rank.
            version: Their label: how many optimizer updates are in them.
            draft_weights: As for `reload`.

        Raises:
            EngineStateError: the engine is broken or in the middle of a weight update.
            RuntimeError: as `reload`, or none of a draft's tokens was accepted.
        """
        self.wake_up(["weights"])
        self.reload(weights, version, draft_weights=draft_weights)
        self.wake_up(["kv_cache"])
        self.reset_prefix_cache()
        with self._draft_watched():
            yield
        # No `finally`: after an error the process is ending, and tidying up would hide the cause.
        self.sleep()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Map what sleep freed: "weights", then "kv_cache"; None is both. Collective.

        Woken weights are unproven at every depth: the engine is STALE until a reload.

        Raises:
            EngineStateError: "kv_cache" before "weights".
            ValueError: an unknown tag.
        """
        tags = tags if tags is not None else ["weights", "kv_cache"]
        for tag in tags:
            if tag not in ("weights", "kv_cache"):
                raise ValueError(f"wake_up's tags must be weights or kv_cache, got {tag!r}")
        for tag in tags:
            is_weights = tag == "weights"
            states.check(self.state, Call.WAKE_WEIGHTS if is_weights else Call.WAKE_KV)
            needed = self.is_sleeping() if is_weights else not self.state.has_kv
            if needed:
                with self._timings.timed("switch/wake_s"), self._breaks("wake_up"):
                    self._parts.wake(tag)
                    if self.state.paused and not is_weights:
                        self._parts.pause(clear_cache=False)  # vLLM's wake has resumed it
                if is_weights and self.state.depth == "2":
                    self._reloader.forget()
            self.state = states.after_wake_weights(self.state) if is_weights else states.after_wake_kv(self.state)

    def sleep(self, depth: str | None = None) -> None:
        """Free memory for the policy; requests in flight are kept, and computed again after the wake. Collective.

        Args:
            depth: "none", "1" (weights to the host) or "2" (weights dropped); default engine.sleep.
        """
        depth = self._depth if depth is None else depth
        states.check(self.state, Call.SLEEP, in_flight=len(self._requests), depth=depth)
        if self.is_sleeping():
            return
        if depth != "none":
            with self._timings.timed("switch/sleep_s"), self._breaks("sleep"):
                self._parts.sleep(depth)
        self.state = states.after_sleep(self.state, depth)

    def collective_rpc(self, call: str | Callable[..., Any], *args: Any, read_only: bool = False) -> Any:
        """Run a method or function on vLLM's worker of this rank, and return what it returns.

        It may write weights, so the engine is STALE afterwards unless `read_only` says that it does not. What it wrote
        into tensors that the policy does not bring (scales, caches) is kept from then on.
        """
        states.check(self.state, Call.RPC_READ_ONLY if read_only else Call.RPC, in_flight=len(self._requests))
        if not read_only:
            self.state = states.stale(self.state, "collective_rpc")  # also where it raises half way
        result = self._parts.llm.collective_rpc(call, args=args)[0]
        if not read_only:
            self._reloader.keep_as_is()
            self._draft.keep_as_is()
        return result

    def abort(self, request_ids: list[str] | None = None) -> list[Completion]:
        """Drop requests in flight, by default all, without a pause.

        Returns:
            What they have so far, with its logprobs and spans and the finish reason "abort".
        """
        states.check(self.state, Call.ABORT)
        return self._requests.abort(request_ids)

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
            self._requests.put_back(self._requests.abort())
        while mode == "wait" and self._requests:
            self.step()
        if self.state.has_kv:
            self._parts.pause(clear_cache=clear_cache)
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
        states.check(self.state, Call.GENERATE)
        for request in requests:
            self.submit(request, sampling)
        done = 0
        while self._requests:
            done += self.step()
            self._ranks.report(what, f"{done} of {len(requests)} done")
        if self._watch:
            self._watch.note(sampling)
        found = {(completion.slot, completion.sample): completion for completion in self.finished()}
        completions = [found.pop((request.slot, request.sample)) for request in requests]
        self._requests.put_back(list(found.values()))  # those that were submitted by hand before
        require_same_tokens(completions, self._ranks, what)
        return completions

    def submit(self, request: Request, sampling: Sampling) -> str:
        """Queue one request; return the id that `abort` takes."""
        states.check(self.state, Call.SUBMIT)
        return self._requests.submit(request, sampling)

    def step(self) -> int:
        """One scheduler step; return how many requests it finished. While paused it does nothing."""
        states.check(self.state, Call.STEP)
        return 0 if self.state.paused else self._requests.step()

    def finished(self) -> list[Completion]:
        """The completions that finished since the last call."""
        return self._requests.finished()

    def close(self) -> None:
        """Shut vLLM down, and with it the default process group. Collective, last of all: on success only."""
        self._parts.llm.llm_engine.engine_core.shutdown()

    def take_metrics(self) -> dict[str, float]:
        """Seconds and bytes of the switches, and acceptance of drafts, since the last call, by metric name."""
        return self._timings.take()

    @contextmanager
    def _draft_watched(self) -> Iterator[None]:
        if self._watch is None:
            yield
            return
        self._watch.start()
        yield
        self._timings.add(self._watch.finish(self._ranks))

    @contextmanager
    def _breaks(self, what: str) -> Iterator[None]:
        # vLLM's own record of what sleeps is wrong after an exception in between, so nothing may follow one.
        try:
            yield
        except BaseException as error:
            self.state = states.broken(f"{what} raised {type(error).__name__}")
            raise
