"""Every engine state times every call: legal or refused, what a refusal says, and where a call leads."""

import pytest

from colo.engine import states
from colo.engine.states import Call, EngineState, EngineStateError, Phase

STATES = {
    "stale": EngineState(phase=Phase.STALE, why="just built"),
    "updating": EngineState(phase=Phase.UPDATING),
    "loaded": EngineState(phase=Phase.LOADED, version="3", has_kv=False),
    "ready": EngineState(phase=Phase.READY, version="3"),
    "asleep": EngineState(phase=Phase.ASLEEP, depth="2", has_kv=False),
    "broken": EngineState(phase=Phase.BROKEN, why="sleep raised RuntimeError"),
}
# One row per call, one column per state in the order above: y legal, - refused.
TABLE = {
    Call.GENERATE: "---y--",
    Call.SUBMIT: "---y--",
    Call.STEP: "---y--",
    Call.RELOAD: "y-yy--",
    Call.START_UPDATE: "y-yy--",
    Call.UPDATE: "-y----",
    Call.FINISH_UPDATE: "-y----",
    Call.CANCEL_UPDATE: "-y----",
    Call.SLEEP: "y-yyy-",
    Call.WAKE_WEIGHTS: "y-yyy-",
    Call.WAKE_KV: "y-yy--",
    Call.PAUSE: "yyyyy-",
    Call.RESUME: "yyyyy-",
    Call.ABORT: "yyyyy-",
    Call.SET_VERSION: "--yyy-",
    Call.PROVE: "--yy--",
    Call.RPC: "y-yy--",
    Call.RPC_READ_ONLY: "y-yy--",
}
CASES = [(name, call, row[column] == "y") for call, row in TABLE.items() for column, name in enumerate(STATES)]


def test_the_table_names_every_call_and_every_phase() -> None:
    assert set(TABLE) == set(Call)
    assert {state.phase for state in STATES.values()} == set(Phase)


@pytest.mark.parametrize(("name", "call", "is_legal"), CASES)
def test_each_call_is_legal_where_the_table_says(name: str, call: Call, is_legal: bool) -> None:
    state = STATES[name]
    if is_legal:
        states.check(state, call, depth="2")
        return
    with pytest.raises(EngineStateError) as refusal:
        states.check(state, call, depth="2")
    message = str(refusal.value)
    assert message.startswith(f"engine is {state}: {call} is refused")
    assert message.rpartition("; ")[2].startswith(("call ", "end the process"))


@pytest.mark.parametrize("name", STATES)
def test_a_refusal_names_a_next_call_that_is_legal(name: str) -> None:
    state = STATES[name]
    if state.phase is Phase.BROKEN:
        return  # nothing is legal there: the process ends
    for call in Call:
        if TABLE[call][list(STATES).index(name)] == "y":
            continue
        with pytest.raises(EngineStateError) as refusal:
            states.check(state, call)
        advice = str(refusal.value).rpartition("; ")[2].removeprefix("call ")
        if advice.startswith("awake("):
            states.check(state, Call.WAKE_WEIGHTS if state.phase is Phase.ASLEEP else Call.RELOAD)
        else:
            named = [other for other in Call if advice.startswith(str(other)) or f" {other}" in advice]
            assert named, advice
            states.check(state, named[0])


@pytest.mark.parametrize("call", sorted(states.NEEDS_QUIET))
def test_what_writes_or_relabels_weights_waits_for_requests_in_flight(call: Call) -> None:
    states.check(STATES["ready"], call)
    with pytest.raises(EngineStateError, match="3 requests are in flight"):
        states.check(STATES["ready"], call, in_flight=3)
    paused = EngineState(phase=Phase.READY, version="3", paused=True)
    states.check(paused, call, in_flight=3)


@pytest.mark.parametrize("name", STATES)
def test_a_pause_queues_submissions_and_refuses_generate(name: str) -> None:
    state = states.replace(STATES[name], paused=True)
    if state.phase is Phase.BROKEN:
        with pytest.raises(EngineStateError):
            states.check(state, Call.SUBMIT)
    else:
        states.check(state, Call.SUBMIT)
    with pytest.raises(EngineStateError):
        states.check(state, Call.GENERATE)


def test_a_sleeping_engine_does_not_change_its_depth() -> None:
    states.check(STATES["asleep"], Call.SLEEP, depth="2")
    with pytest.raises(EngineStateError, match="sleeps at depth 2, not 1"):
        states.check(STATES["asleep"], Call.SLEEP, depth="1")


def test_waking_kv_first_is_refused_by_name() -> None:
    with pytest.raises(EngineStateError, match="weights are woken first"):
        states.check(STATES["asleep"], Call.WAKE_KV)


@pytest.mark.parametrize(
    ("depth", "phase", "has_kv"),
    [("none", Phase.STALE, True), ("kv", Phase.STALE, False), ("1", Phase.ASLEEP, False), ("2", Phase.ASLEEP, False)],
)
def test_after_any_sleep_the_old_weights_cannot_generate(depth: str, phase: Phase, has_kv: bool) -> None:
    asleep = states.after_sleep(STATES["ready"], depth)
    assert (asleep.phase, asleep.has_kv, asleep.version) == (phase, has_kv, "")
    woken = states.after_wake_kv(states.after_wake_weights(asleep))
    assert woken.phase is Phase.STALE
    with pytest.raises(EngineStateError):
        states.check(woken, Call.GENERATE)
    reloaded = states.after_reload(woken, "4")
    assert (reloaded.phase, reloaded.version) == (Phase.READY, "4")


def test_the_moves_of_awake_lead_from_asleep_to_ready() -> None:
    state = STATES["asleep"]
    state = states.after_wake_weights(state)
    assert str(state) == "STALE(woken, not reloaded)"
    state = states.after_reload(state, "7")
    assert str(state) == "LOADED(7)"
    state = states.after_wake_kv(state)
    assert str(state) == "READY(7)"
    assert states.after_wake_weights(state) == state
    assert states.after_wake_kv(state) == state


def test_a_pause_survives_sleep_wake_and_reload() -> None:
    state = states.replace(STATES["ready"], paused=True)
    for move in (
        lambda s: states.after_sleep(s, "2"),
        states.after_wake_weights,
        lambda s: states.after_reload(s, "4"),
        states.after_wake_kv,
        lambda s: states.stale(s, "x"),
    ):
        state = move(state)
        assert state.paused
