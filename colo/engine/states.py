"""Which call on the engine is legal when, and what each refusal says. Pure: no torch, no vllm.

vLLM's own answers to these calls are an endless loop (generate asleep), a hang (sleep with requests in
flight, then generate), a segmentation fault (a weight write while asleep) or text made of `!!!!` (a wake
without a reload). Here each is an `EngineStateError`, at once, on every rank.
"""

from dataclasses import dataclass, replace
from enum import StrEnum


class EngineStateError(RuntimeError):
    """A call that the engine's state does not allow; names the state, the call and the next legal call."""


class Phase(StrEnum):
    """What the engine holds."""

    STALE = "STALE"
    """Weights are mapped but not proven: after the build, a wake, a failed reload."""
    UPDATING = "UPDATING"
    """Between the start and the finish of a weight update: old and new weights are mixed."""
    LOADED = "LOADED"
    """The weights of a known version; the KV cache is freed."""
    READY = "READY"
    """The weights of a known version, and a KV cache: it can generate."""
    ASLEEP = "ASLEEP"
    """Weights and KV cache are freed."""
    BROKEN = "BROKEN"
    """A sleep or a wake raised; what is mapped is unknown."""


class Call(StrEnum):
    """What a caller may ask for; the values are the names that refusals print."""

    GENERATE = "generate"
    SUBMIT = "submit"
    STEP = "step"
    RELOAD = "reload"
    START_UPDATE = "start_weight_update"
    UPDATE = "update_weights"
    FINISH_UPDATE = "finish_weight_update"
    CANCEL_UPDATE = "cancel_weight_update"
    SLEEP = "sleep"
    WAKE_WEIGHTS = 'wake_up(["weights"])'
    WAKE_KV = 'wake_up(["kv_cache"])'
    PAUSE = "pause_generation"
    RESUME = "resume_generation"
    ABORT = "abort"
    SET_VERSION = "update_weight_version"
    PROVE = "prove"
    RPC = "collective_rpc"
    RPC_READ_ONLY = "collective_rpc(read_only=True)"


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """One state: a phase and what goes with it."""

    phase: Phase
    version: str = ""
    """The label of the weights, in LOADED and READY."""
    why: str = ""
    """The cause, in STALE and BROKEN."""
    depth: str = ""
    """How deep the sleep is, in ASLEEP: "1" or "2"."""
    has_kv: bool = True
    """Whether the KV cache is mapped."""
    paused: bool = False
    """Beside the phase: submit queues, step returns nothing, generate is refused."""

    def __str__(self) -> str:
        detail = self.why or self.version or self.depth
        return f"{self.phase}({detail})" if detail else str(self.phase)


NEEDS_LOADED = "call awake(weights, version)"
NEXT_CALL = {
    Phase.STALE: NEEDS_LOADED,
    Phase.UPDATING: f"call {Call.FINISH_UPDATE} or {Call.CANCEL_UPDATE}",
    Phase.LOADED: f"call {Call.WAKE_KV}",
    Phase.READY: "call generate",
    Phase.ASLEEP: f"call {Call.WAKE_WEIGHTS}, or {NEEDS_LOADED.removeprefix('call ')}",
    Phase.BROKEN: "end the process",
}
_LOADED_CALLS = {
    Call.RELOAD,
    Call.START_UPDATE,
    Call.SLEEP,
    Call.WAKE_WEIGHTS,
    Call.WAKE_KV,
    Call.SET_VERSION,
    Call.RPC,
    Call.RPC_READ_ONLY,
}
ALLOWED: dict[Phase, set[Call]] = {
    Phase.STALE: _LOADED_CALLS - {Call.SET_VERSION},
    Phase.UPDATING: {Call.UPDATE, Call.FINISH_UPDATE, Call.CANCEL_UPDATE},
    Phase.LOADED: _LOADED_CALLS | {Call.PROVE},
    Phase.READY: _LOADED_CALLS | {Call.PROVE, Call.GENERATE, Call.SUBMIT, Call.STEP},
    Phase.ASLEEP: {Call.SLEEP, Call.WAKE_WEIGHTS, Call.SET_VERSION},
    Phase.BROKEN: set(),
}
ALWAYS = {Call.ABORT, Call.PAUSE, Call.RESUME}
"""Legal in every phase but BROKEN."""
NEEDS_QUIET = {Call.RELOAD, Call.START_UPDATE, Call.SET_VERSION, Call.RPC, Call.RPC_READ_ONLY}
"""Legal in READY only with nothing in flight, or paused."""


def check(state: EngineState, call: Call, *, in_flight: int = 0, depth: str = "") -> None:
    """Refuse `call` if `state` does not allow it.

    Args:
        state: Now.
        call: What is asked for.
        in_flight: Requests that were submitted and are not finished.
        depth: How deep a sleep is asked for.

    Raises:
        EngineStateError: with the state, the call and the next legal call.
    """
    reason = _reason(state, call, in_flight, depth)
    if reason:
        raise refusal(state, call, *reason)


def refusal(state: EngineState, call: Call, why: str, next_call: str) -> EngineStateError:
    """What a refused call raises."""
    return EngineStateError(f"engine is {state}: {call} is refused ({why}); {next_call}")


def _reason(state: EngineState, call: Call, in_flight: int, depth: str) -> tuple[str, str] | None:
    """(why it is refused, the next legal call), None where it is legal."""
    phase = state.phase
    if phase is Phase.BROKEN:
        return "a sleep or a wake raised", NEXT_CALL[phase]
    if call in ALWAYS:
        return None
    if call is Call.SUBMIT and state.paused:
        return None
    if call not in ALLOWED[phase]:
        if phase is Phase.ASLEEP and call is Call.WAKE_KV:
            return "weights are woken first", f"call {Call.WAKE_WEIGHTS}"
        if call in ALLOWED[Phase.UPDATING]:
            return (
                "no weight update is under way",
                f"call {Call.START_UPDATE}" if phase is not Phase.ASLEEP else NEXT_CALL[phase],
            )
        return _HOLDS[phase], NEXT_CALL[phase]
    if call is Call.GENERATE and state.paused:
        return "it is paused", f"call {Call.RESUME}"
    if call is Call.SLEEP and phase is Phase.ASLEEP and depth != state.depth:
        return f"it sleeps at depth {state.depth}, not {depth}", f"call {Call.WAKE_WEIGHTS} first"
    if call in NEEDS_QUIET and phase is Phase.READY and in_flight and not state.paused:
        return (
            f"{in_flight} requests are in flight",
            f"call {Call.STEP} until they are finished, {Call.ABORT} or {Call.PAUSE}",
        )
    return None


_HOLDS = {
    Phase.STALE: "its weights are not those of the policy",
    Phase.UPDATING: "its weights are half old, half new",
    Phase.LOADED: "it has no KV cache",
    Phase.READY: "it has work",
    Phase.ASLEEP: "it has no weights",
}


def after_build() -> EngineState:
    """The state of an engine that vLLM has just built: whatever weights it read are not the policy's."""
    return EngineState(phase=Phase.STALE, why="just built")


def after_sleep(state: EngineState, depth: str) -> EngineState:
    """Depth none frees nothing and kv frees the cache; both still mean that old weights may not generate again."""
    if depth in ("none", "kv"):
        has_kv = state.has_kv and depth == "none"
        return EngineState(phase=Phase.STALE, why=f"slept at depth {depth}", has_kv=has_kv, paused=state.paused)
    return EngineState(phase=Phase.ASLEEP, depth=depth, has_kv=False, paused=state.paused)


def after_wake_weights(state: EngineState) -> EngineState:
    """Woken weights are unproven at every depth; a no-op where they are mapped."""
    if state.phase is not Phase.ASLEEP:
        return state
    return EngineState(phase=Phase.STALE, why="woken, not reloaded", has_kv=False, paused=state.paused)


def after_wake_kv(state: EngineState) -> EngineState:
    """LOADED becomes READY; STALE stays STALE."""
    phase = Phase.READY if state.phase is Phase.LOADED else state.phase
    return replace(state, phase=phase, has_kv=True)


def after_reload(state: EngineState, version: str) -> EngineState:
    """The weights of `version`: READY where KV is mapped, else LOADED."""
    phase = Phase.READY if state.has_kv else Phase.LOADED
    return EngineState(phase=phase, version=version, has_kv=state.has_kv, paused=state.paused)


def updating(state: EngineState) -> EngineState:
    """A weight update is under way; what is mapped stays mapped."""
    return EngineState(phase=Phase.UPDATING, has_kv=state.has_kv, paused=state.paused)


def unfinished(state: EngineState, missing: str) -> EngineStateError:
    """The refusal of a finish that would leave weights which no chunk brought and which no proof knows."""
    next_call = f"call {Call.UPDATE} with them, or {Call.CANCEL_UPDATE}"
    return refusal(state, Call.FINISH_UPDATE, f"no chunk brought {missing}", next_call)


def paused(state: EngineState, *, is_paused: bool) -> EngineState:
    """The same with the flag set or taken away."""
    return replace(state, paused=is_paused)


def stale(state: EngineState, why: str) -> EngineState:
    """The weights can no longer be trusted; what is mapped stays mapped."""
    return EngineState(phase=Phase.STALE, why=why, has_kv=state.has_kv, paused=state.paused)


def broken(why: str) -> EngineState:
    """Nothing is known any more."""
    return EngineState(phase=Phase.BROKEN, why=why)
