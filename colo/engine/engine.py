"""The vLLM engine in this process: build, generate, awake, sleep."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from colo.config import DEPTHS, Config
from colo.engine import states
from colo.engine.build import build_vllm
from colo.engine.depth import AUTO, GIB, AutoDepth, UpdatePeak, capacity_bytes
from colo.engine.generation import Generation
from colo.engine.memory import Ledger
from colo.engine.memory_baseline import Baseline
from colo.engine.memory_table import TOTAL
from colo.engine.states import Call
from colo.ranks import Ranks
from colo.types import NamedTensors


class Engine(Generation):
    """One vLLM engine, spread over this rank's tensor-parallel group, asleep while the policy updates.

    Every method is for all ranks of the launch to call together, or is refused on each of them.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        model_folder: Path,
        stand_ins: Iterable[tuple[str, Tensor]],
        baseline: Baseline | None = None,
        *,
        beside_policy: bool = True,
    ) -> None:
        """Build the engine, plan and try its reload, and put it to sleep. Collective.

        Args:
            config: The run's.
            ranks: Their process group is up, and every rank builds now.
            model_folder: What vLLM reads.
            stand_ins: What will be handed over at each reload: checkpoint names, whole shapes and dtypes, on meta.
            baseline: The memory that was in use before, for the ledger.
            beside_policy: Whether a policy will be trained beside it, for which a planned KV cache leaves room.
        """
        stand_ins = list(stand_ins)
        parts = build_vllm(config, ranks, model_folder, stand_ins, beside_policy=beside_policy)
        super().__init__(config, ranks, parts, model_folder, stand_ins)
        self._policy_bytes: Callable[[], Mapping[str, int]] = dict
        self.ledger = Ledger(parts, baseline or Baseline(), lambda: self._policy_bytes(), config)
        self._depth = config.engine.sleep
        margin = int(config.engine.sleep_margin_gib * GIB)
        self._auto = AutoDepth(ranks, margin) if self._depth == AUTO else None
        self.sleep()
        self._timings.take()  # the sleep after the build is part of no step

    def account_for(self, policy_bytes: Callable[[], Mapping[str, int]]) -> None:
        """Let the ledger ask what the policy holds at a time, in bytes: policy_parameters, gradients, optimizer."""
        self._policy_bytes = policy_bytes

    def is_sleeping(self) -> bool:
        """True while the weights are freed."""
        return self.state.phase is states.Phase.ASLEEP

    @contextmanager
    def awake(
        self,
        weights: NamedTensors,
        version: str,
        *,
        draft_weights: NamedTensors | None = None,
        step_aside: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Inside, the engine generates with `weights` and has the free memory; outside, the policy has it. Collective.

        Args:
            weights: Every tensor of the policy, by checkpoint name, in one order on every rank.
            version: Their label: how many optimizer updates are in them.
            draft_weights: As for `reload`.
            step_aside: Called once the engine holds the weights and before its KV cache is mapped: frees or moves what
                `weights` yielded.

        Raises:
            EngineStateError: the engine is broken or in the middle of a weight update.
            RuntimeError: as `reload`, or none of a draft's tokens was accepted.
        """
        self.wake_up(["weights"])
        self.ledger.note("wake")
        self.reload(weights, version, draft_weights=draft_weights)
        self.ledger.note("reload")
        if step_aside:
            self.drop_policy_views()
            step_aside()
        self.wake_up(["kv_cache"])
        self.reset_prefix_cache()
        with self._draft_watched():
            yield
        self.ledger.note("generate")
        # No `finally`: after an error the process is ending, and tidying up would hide the cause.
        self.sleep()
        self.ledger.note("asleep")

    @contextmanager
    def aside(
        self, num_tokens: int, num_micro_batches: int, held_at_peak: Callable[[], Mapping[str, int]] = dict
    ) -> Iterator[None]:
        """Inside, the policy updates, in the memory that the engine's sleep leaves it. Collective.

        What it takes is in the ledger, and with engine.sleep=auto it decides how deep the engine sleeps: now, where
        this update's micro-batches are larger than those before, and from the next sleep on.

        Args:
            num_tokens: Of this rank's largest micro-batch, padding counted.
            num_micro_batches: Of this rank's largest minibatch.
            held_at_peak: What the policy held at the most inside, asked at the end; of the parts of `account_for`.

        Raises:
            OutOfMemoryError: memory ran out inside; says who held it, and which settings would make it fit.
        """
        if self._auto:
            depth = self._auto.for_update(num_tokens, *self._awake_bytes())
            if depth != self._auto.depth:
                self.sleep(depth)
        with self.ledger.updating(held_at_peak):
            yield
        if self._auto:
            seen = self.ledger.last("update")
            peak = UpdatePeak(
                used=seen[TOTAL],
                capacity=capacity_bytes(self._ranks.device),
                mapped=seen["engine_weights"] + seen["kv_cache"],
                activations=seen["activations"],
                gradients=seen["gradients"],
                num_tokens=num_tokens,
                num_micro_batches=num_micro_batches,
            )
            self._auto.add(peak, *self._awake_bytes())

    def _awake_bytes(self) -> tuple[int, int]:
        """What weights and KV cache took when the engine was last awake."""
        seen = self.ledger.last("generate")
        return seen["engine_weights"], seen["kv_cache"]

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
                with self._timings.timed("switch/wake_s"), self.ledger.explains("wake_up"), self._breaks("wake_up"):
                    self._parts.wake(tag)
                    if self.state.paused and not is_weights:
                        self._requests.freeze(clear_cache=False)  # vLLM's wake has resumed it
                if is_weights and self.state.depth == "2":
                    self._reloader.forget()
            self.state = states.after_wake_weights(self.state) if is_weights else states.after_wake_kv(self.state)

    def sleep(self, depth: str | None = None) -> None:
        """Free memory for the policy; requests in flight are kept, and computed again after the wake. Collective.

        Args:
            depth: "none", "kv" (the KV cache dropped), "1" (and the weights to the host) or "2" (and the weights
                dropped); default engine.sleep.

        Raises:
            EngineStateError: asleep at another depth of 1 and 2, or inside a weight update.
            ValueError: no such depth.
        """
        if depth is None:
            depth = self._auto.depth if self._auto else self._depth
        if depth not in DEPTHS:
            raise ValueError(f"depth must be one of {', '.join(DEPTHS)}, got {depth!r}")
        states.check(self.state, Call.SLEEP, in_flight=len(self._requests), depth=depth)
        if self.is_sleeping():
            return
        if depth in ("1", "2") or (depth == "kv" and self.state.has_kv):
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

    def close(self) -> None:
        """Shut vLLM down, and with it the default process group. Collective, last of all: on success only."""
        self._parts.shut_down()

    def take_metrics(self) -> dict[str, float]:
        """Seconds, bytes and memory of the switches, and acceptance of drafts, since the last call, by metric name."""
        return self._timings.take() | self.ledger.take()

    @contextmanager
    def _breaks(self, what: str) -> Iterator[None]:
        # vLLM's own record of what sleeps is wrong after an exception in between, so nothing may follow one.
        try:
            yield
        except BaseException as error:
            self.state = states.broken(f"{what} raised {type(error).__name__}")
            raise
