"""The vLLM engine in this process: build, generate, awake, sleep."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from colo.config import Config
from colo.engine import states
from colo.engine.build import VllmParts, build_vllm
from colo.engine.reload import load_weights
from colo.engine.states import Call, EngineState
from colo.ranks import Ranks
from colo.types import Completion, NamedTensors, Request, Sampling, WeightVersionSpan

logger = logging.getLogger(__name__)


class Engine:
    """One vLLM engine, spread over this rank's tensor-parallel group, asleep while the policy updates.

    Every method is for all ranks of the launch to call together, or is refused on each of them.
    """

    def __init__(self, config: Config, ranks: Ranks, model_folder: Path) -> None:
        """Build the engine and put it to sleep. Collective: the process group is up, and every rank builds now."""
        self._ranks = ranks
        self._depth = config.engine.sleep
        self._parts: VllmParts = build_vllm(config, ranks, model_folder)
        self._in_flight: dict[str, Request] = {}
        self._finished: list[Completion] = []
        self._num_submitted = 0
        self._timings: dict[str, float] = {}
        self.state: EngineState = states.after_build()
        self.sleep()
        self._timings.clear()  # the sleep after the build is part of no step

    def require_reloadable(self) -> None:
        """Refuse a model that this backend cannot reload in place. Collective.

        Raises:
            ValueError: on every rank.
        """
        found = self._parts.unreloadable

        def judge() -> None:
            if found:
                raise ValueError(f"model must have experts that can be reloaded in place, got {found} that cannot")

        self._ranks.agreed(judge, "trying a reload")

    @property
    def weight_version(self) -> str:
        """The label of the weights that are loaded; empty while none is known."""
        return self.state.version

    def is_sleeping(self) -> bool:
        """True while the weights are freed."""
        return self.state.phase is states.Phase.ASLEEP

    @contextmanager
    def awake(self, weights: NamedTensors, version: str) -> Iterator[None]:
        """Inside, the engine generates with `weights` and has the free memory; outside, the policy has it. Collective.

        Args:
            weights: Every tensor of the policy, by checkpoint name, in one order on every rank.
            version: Their label: how many optimizer updates are in them.

        Raises:
            EngineStateError: the engine is broken or in the middle of a weight update.
        """
        self.wake_up(["weights"])
        self.reload(weights, version)
        self.wake_up(["kv_cache"])
        self.reset_prefix_cache()
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
        for tag in tags if tags is not None else ["weights", "kv_cache"]:
            if tag not in ("weights", "kv_cache"):
                raise ValueError(f"wake_up's tags must be weights or kv_cache, got {tag!r}")
            is_weights = tag == "weights"
            states.check(self.state, Call.WAKE_WEIGHTS if is_weights else Call.WAKE_KV)
            needed = self.is_sleeping() if is_weights else not self.state.has_kv
            if needed:
                with self._timed("switch/wake_s"), self._breaks("wake_up"):
                    self._parts.wake(tag)
            self.state = states.after_wake_weights(self.state) if is_weights else states.after_wake_kv(self.state)

    def sleep(self, depth: str | None = None) -> None:
        """Free memory for the policy; requests in flight are kept, and computed again after the wake. Collective.

        Args:
            depth: "none", "1" (weights to the host) or "2" (weights dropped); default engine.sleep.
        """
        depth = self._depth if depth is None else depth
        states.check(self.state, Call.SLEEP, in_flight=len(self._in_flight), depth=depth)
        if self.is_sleeping():
            return
        if depth != "none":
            with self._timed("switch/sleep_s"), self._breaks("sleep"):
                self._parts.sleep(depth)
        self.state = states.after_sleep(self.state, depth)

    def reload(self, weights: NamedTensors, version: str) -> None:
        """Write the policy's weights into the engine in place and label them. Collective.

        Raises:
            EngineStateError: asleep, inside an update, or with requests in flight.
            RuntimeError: `weights` left an engine parameter unwritten; the engine stays STALE.
        """
        states.check(self.state, Call.RELOAD, in_flight=len(self._in_flight))
        self.state = states.stale(self.state, "a reload did not finish")
        with self._timed("switch/reload_s"):
            self._timings["reload/bytes"] = load_weights(self._parts, weights)
            self._parts.synchronize()
        self._parts.llm.update_weight_version(version)
        self.state = states.after_reload(self.state, version)

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes: their KV is of other weights.

        Raises:
            RuntimeError: blocks are in use, so that vLLM kept them.
        """
        if not self._parts.llm.reset_prefix_cache(reset_running_requests=bool(self._in_flight)):
            raise RuntimeError("the prefix cache was not reset: blocks are in use")

    def update_weight_version(self, label: str) -> None:
        """Change the label of the loaded weights, and nothing else."""
        states.check(self.state, Call.SET_VERSION, in_flight=len(self._in_flight))
        self._parts.llm.update_weight_version(label)
        if self.state.version:
            self.state = states.after_reload(self.state, label)

    def collective_rpc(self, call: str | Callable[..., Any], *args: Any, read_only: bool = False) -> Any:
        """Run a method or function on vLLM's worker of this rank, and return what it returns.

        It may write weights, so the engine is STALE afterwards unless `read_only` says that it does not.
        """
        states.check(self.state, Call.RPC_READ_ONLY if read_only else Call.RPC, in_flight=len(self._in_flight))
        result = self._parts.llm.collective_rpc(call, args=args)[0]
        if not read_only:
            self.state = states.stale(self.state, "collective_rpc")
        return result

    def abort(self) -> int:
        """Drop every request in flight; return how many."""
        states.check(self.state, Call.ABORT)
        self._parts.llm.llm_engine.abort_request(list(self._in_flight), internal=False)
        count = len(self._in_flight)
        self._in_flight.clear()
        return count

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
        while self._in_flight:
            done += self.step()
            self._ranks.report(what, f"{done} of {len(requests)} done")
        found = {(completion.slot, completion.sample): completion for completion in self.finished()}
        completions = [found[request.slot, request.sample] for request in requests]
        self._require_same_tokens(completions, what)
        return completions

    def submit(self, request: Request, sampling: Sampling) -> None:
        """Queue one request."""
        states.check(self.state, Call.SUBMIT)
        self._num_submitted += 1
        request_id = self._parts.add_request(str(self._num_submitted), request, sampling)
        self._in_flight[request_id] = request

    def step(self) -> int:
        """One scheduler step; return how many requests it finished."""
        states.check(self.state, Call.STEP)
        finished = [output for output in self._parts.llm.llm_engine.step() if output.finished]
        self._finished += [_to_completion(self._in_flight.pop(output.request_id), output) for output in finished]
        return len(finished)

    def finished(self) -> list[Completion]:
        """The completions that finished since the last call."""
        completions, self._finished = self._finished, []
        return completions

    def close(self) -> None:
        """Shut vLLM down, and with it the default process group. Collective, last of all: on success only."""
        self._parts.llm.llm_engine.engine_core.shutdown()

    def take_timings(self) -> dict[str, float]:
        """Seconds and bytes of the switches since the last call, by metric name."""
        timings, self._timings = self._timings, {}
        return timings

    def _require_same_tokens(self, completions: list[Completion], what: str) -> None:
        tokens = repr([(c.slot, c.sample, c.token_ids) for c in completions])
        digests = self._ranks.gather_in_group(hashlib.sha256(tokens.encode()).hexdigest(), f"{what}: comparing tokens")
        differ = [rank for rank, digest in zip(self._ranks.group_ranks, digests, strict=True) if digest != digests[0]]
        if differ:
            raise RuntimeError(
                f"{what}: the ranks of one engine sampled different tokens: rank {self._ranks.group_ranks[0]} "
                f"and rank {', '.join(map(str, differ))}"
            )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._timings[name] = self._timings.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def _breaks(self, what: str) -> Iterator[None]:
        # vLLM's own record of what sleeps is wrong after an exception in between, so nothing may follow one.
        try:
            yield
        except BaseException as error:
            self.state = states.broken(f"{what} raised {type(error).__name__}")
            raise


def _to_completion(request: Request, output: Any) -> Completion:
    """vLLM's output as our record.

    Raises:
        RuntimeError: a logprob or a version label is missing; neither is ever made up.
    """
    sampled = output.outputs[0]
    token_ids, where = list(sampled.token_ids), f"completion {request.sample} of prompt {request.slot}"
    flat = sampled.logprobs
    if flat is None or len(flat.start_indices) != len(token_ids):
        raise RuntimeError(
            f"{where}: {0 if flat is None else len(flat.start_indices)} logprobs for {len(token_ids)} tokens"
        )
    logprobs = []
    for position, (start, token) in enumerate(zip(flat.start_indices, token_ids, strict=True)):
        if flat.token_ids[start] != token:
            raise RuntimeError(
                f"{where}: the logprob at position {position} is of token {flat.token_ids[start]}, not {token}"
            )
        logprobs.append(flat.logprobs[start])
    if sampled.weight_versions is None:
        raise RuntimeError(f"{where}: no weight version was reported")
    return Completion(
        slot=request.slot,
        sample=request.sample,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sampled.finish_reason,
        spans=[WeightVersionSpan(version=s.version, start=s.start, end=s.end) for s in sampled.weight_versions],
        num_cached_tokens=output.num_cached_tokens or 0,
    )
