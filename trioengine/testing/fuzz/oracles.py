"""Invariants of the engine and of its callers; each check raises AssertionError."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.generation import Generation
from trioengine.actors.session import Session
from trioengine.core.errors import (
    EngineAsleep,
    EngineClosed,
    EngineOverloaded,
    RequestRejected,
    SamplingFailed,
    SessionBusy,
    SessionEnded,
    TimedOut,
    WorkerLost,
)
from trioengine.core.lifecycle import Phase, Power
from trioengine.core.types import Cause, Completion, FinishReason
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.answers import check_answer
from trioengine.testing.fuzz.callers import UNPREPARED, Call, Reader, SessionHolder
from trioengine.testing.fuzz.conversations import (
    RAW,
    Called,
    Turn,
    check_failed_image,
    is_mixed,
    is_refused,
    outline,
    outline_of,
    pictures_of,
    prompt_ids,
    prompt_of,
    raw_turn,
    shortened,
)
from trioengine.testing.fuzz.faults import Harm, InjectedFaults
from trioengine.testing.fuzz.grammars import is_bad
from trioengine.testing.fuzz.request_log import RequestLog
from trioengine.testing.simulated_worker import SimulatedWorker

ONE_SHOTS = ("ask", "raw", "show")  # calls that open a session


def check_books(engine: Engine) -> None:
    """At rest: the counters balance and agree with the sessions, and no caller waits for a free slot."""
    inside.check_books(engine)
    crashed = [session for session in inside.sessions(engine) if session.end_cause is Cause.ERROR]
    assert not crashed, f"a bug of the engine's ended {crashed}"


def check_limits(engine: Engine) -> None:
    """After every rule: no more is admitted than there is room for."""
    config, in_flight, num_sessions = engine.config, inside.num_in_flight(engine), inside.num_sessions(engine)
    slots = config.max_num_seqs + config.max_num_queued_reqs
    assert in_flight <= slots, f"{in_flight} requests have the {slots} slots"
    assert num_sessions <= config.max_sessions, f"{num_sessions} sessions have the {config.max_sessions} slots"


def check_counts(engine: Engine) -> None:
    """After every rule: the counts of requests add up, and those in flight are counted where they are."""
    statistics = engine.statistics()
    over = statistics.finished + statistics.aborted + statistics.failed
    in_flight = statistics.preparing + statistics.waiting + statistics.running + statistics.suspended
    assert statistics.received == over + in_flight, f"the counts do not add up: {statistics}"
    due = Counter(inside.phase(session) for session in inside.sessions(engine))
    preparing, suspended = due[Phase.PREPARING], due[Phase.SUSPENDED]
    assert statistics.preparing == preparing, f"{preparing} requests are prepared, counted are {statistics.preparing}"
    most = suspended + due[Phase.STOPPING] + due[Phase.ENDING]
    assert suspended <= statistics.suspended <= most, f"{suspended} are suspended, counted are {statistics.suspended}"
    begun = sum(
        inside.num_tokens(request) > 0 or inside.phase(inside.session_of(request)) in inside.STOPPING
        for request in inside.in_flight(engine)  # an aborted one takes no tokens that come for it
    )
    assert statistics.running <= begun, f"{begun} requests have a token, and {statistics.running} are counted to run"


def check_decided(engine: Engine) -> None:
    """No task can run: requests with an outcome, or past their deadline, were stopped on the worker."""
    for session in inside.sessions(engine):
        generation = inside.request_of(session)
        if generation is not None and inside.is_going(generation):
            assert generation.outcome is None, f"it has its outcome, and goes on: {session}"
            assert trio.current_time() < inside.deadline(generation), f"its time is over, and it goes on: {session}"


def check_stopped(engine: Engine, requests: AbstractSet[object]) -> None:
    """Right after all of these were aborted: none goes on."""
    for session in inside.sessions(engine):
        generation = inside.request_of(session)
        goes_on = generation is not None and inside.is_going(generation) and generation in requests
        assert not goes_on, f"all were aborted, and it goes on: {session}"


def check_all_aborted(generations: Sequence[Generation]) -> None:
    """Right after all were aborted: none of these, which had no outcome, goes on, unless its session has ended."""
    for generation in generations:
        is_over = inside.is_aborted(generation) or inside.session_of(generation).end_cause is not None
        assert is_over, f"all were aborted, and it goes on: {generation} in {inside.session_of(generation)}"


def check_line(engine: Engine) -> None:
    """Right after all in the lines were aborted: the lines are empty."""
    waiting = inside.num_waiting(engine)
    assert not waiting, f"all were aborted, and {waiting} wait in line"


def all_going(engine: Engine, *, with_waiting: bool) -> list[inside.Request]:
    """The requests that an abort of all is to end: without an outcome, and not aborted before."""
    return [
        request
        for _, request in inside.requests(engine)
        if (with_waiting or inside.is_in_flight(request)) and inside.is_undecided(request)
    ]


def check_reader(reader: Reader, max_model_len: int, faults: InjectedFaults, requests: RequestLog) -> None:
    """A request that is over: one outcome, and the text that the model gives for its history, as far as it goes.

    An error has its reason in the injected faults.
    """
    generation = reader.generation
    causes = requests.causes_of(generation, faults.causes(reader.life) | reader.causes)
    if generation is None or not reader.entered:
        _check_refusal(reader, max_model_len, faults)
        cause = None if generation is None or generation.outcome is None else generation.outcome.cause
        assert cause is None or cause in causes, f"aborted on its way in by {cause}, the first cause was {causes}"
        if generation is not None and cause is Cause.SLEEP and not requests.had_slot(generation):
            is_excused = faults.hit(reader.life, Harm.SLEEP_EMPTIES_LINES)
            assert is_excused, f"no sleep aborts the requests in line, and one has ended it there: {generation}"
        return
    outcome = generation.outcome
    assert outcome is not None, f"{reader} is over without an outcome"
    if reader.outcome_at_leaving is not None:
        assert outcome is reader.outcome_at_leaving, f"{reader.outcome_at_leaving} became {outcome}"
    turns, dropped_turns = asked(reader, _committed_before(reader, generation.request_id))
    if not inside.num_tokens(generation):
        turns = _computable(turns)
    prompt, images = prompt_of((*_tools_of(reader), *turns))
    if outcome.finish_reason is FinishReason.ERROR:
        found, expected = repr(reader.error), repr(outcome.error)
        assert reader.error is None or found == expected, f"{found} instead of {expected}"
        too_long = len(prompt) >= max_model_len
        match outcome.error:
            case WorkerLost():
                assert faults.hit(reader.life, Harm.WORKERS), f"no worker was harmed, and {outcome.error!r}"
                assert not requests.is_fixed(generation), f"it was aborted by {causes}, and then {outcome.error!r}"
                _check_lost(reader, generation, faults)
            case RequestRejected() as error:
                has_bad_grammar = error.code == "invalid_grammar" and is_bad(reader.params.grammar)
                is_bad_prompt = too_long or check_failed_image(error, generation, turns)
                assert has_bad_grammar or is_bad_prompt, f"nothing was wrong, and {expected}"
            case SamplingFailed():
                assert generation.request_id in faults.requests, f"nothing was wrong, and {expected}"
            case error:
                assert isinstance(error, EngineClosed), f"a request ends with {expected}"
                assert faults.closing, f"the engine was not closed, and {expected}"
        return
    params = reader.answered_params
    check_answer(
        generation.completion,
        prompt,
        params,
        max_model_len,
        causes,
        faults.paths,
        images,
        reader.tools,
        reader.holder.adapter_path,
    )
    if generation.completion.token_ids:
        found_turns = generation.completion.dropped_turns
        assert found_turns == dropped_turns, f"{found_turns} turns are dropped, {dropped_turns} are too many"
    if outcome.cause is Cause.SLEEP and requests.was_prepared(generation):
        is_excused = faults.hit(reader.life, Harm.SLEEPS_ABORT)
        assert is_excused, f"no sleep aborts requests, and it was with the worker: {generation}"


def _check_lost(reader: Reader, generation: Generation, faults: InjectedFaults) -> None:
    """Where requests go on with the next worker, one is lost after many deaths, or with the engine, or by itself."""
    engine = reader.holder.engine
    if engine.config.on_worker_loss == "resume" and inside.failure(engine) is None:
        is_poisoned = generation.request_id in faults.poisoned
        assert is_poisoned or faults.deaths > inside.MAX_RESUMES, f"{faults.deaths} deaths, and {generation} is lost"


def _check_refusal(reader: Reader, max_model_len: int, faults: InjectedFaults) -> None:
    """A request that was not entered was refused with a reason, or its reader went."""
    error, others = reader.error, [other for other in reader.holder.readers if other is not reader]
    match error:
        case None if reader.prompt != UNPREPARED:
            assert reader.scope.cancel_called, f"it was not entered, and raised no error: {reader.generation}"
        case RequestRejected(code="empty_prompt"):
            is_empty = not (reader.prompt or reader.media or reader.results)
            assert is_empty, f"{reader.turns!r} is not empty, and {error!r}"
        case RequestRejected():
            assert reader.generation is not None, "it was reserved, and then refused"
            turns, _ = asked(reader, _committed_before(reader, reader.generation.request_id))
            if error.code == "mixed_prompts":
                assert is_mixed(turns), f"its turns are of one kind, and {error!r}: {turns}"
                return
            if error.code == "invalid_grammar":
                assert is_bad(reader.params.grammar), f"its grammar can be compiled, and {error!r}"
                return
            length = len(prompt_ids((*_tools_of(reader), *_computable(turns))))
            if error.code == "image_dropped" or is_refused(error.code, turns[-1][1]):
                return  # the one is judged where it was raised
            assert length >= max_model_len, f"the prompt has {length} tokens, and {error!r}"
        case SessionBusy():
            assert others, f"the session has no other request, and {error!r}"
        case SessionEnded():
            assert reader.holder.gave_up, f"the session was not ended, and {error!r}"
        case EngineClosed():
            may_end = faults.hit(reader.life, Harm.CLOSING, Harm.WORKERS)
            assert may_end, f"the engine was not closed, and {error!r}"
        case WorkerLost():
            assert faults.hit(reader.life, Harm.WORKERS), f"no worker was harmed, and {error!r}"
        case None | TimedOut():  # judged where it was raised
            pass
        case _:  # judged where it was raised
            assert isinstance(error, EngineOverloaded | EngineAsleep), f"refused by {error!r}"


def check_call(call: Call, faults: InjectedFaults) -> None:
    """The error of a call has its reason in the injected faults; refusals are judged elsewhere."""
    match call.error:
        case EngineClosed():
            may_end = faults.hit(call.life, Harm.CLOSING, Harm.WORKERS)
            assert may_end, f"the engine was not closed, and {call.name}: {call.error!r}"
        case WorkerLost():
            may_end = faults.hit(call.life, Harm.CLOSING, Harm.WORKERS)  # its last frames have a moment to arrive
            assert may_end or faults.retired, f"no worker was harmed, and {call.name}: {call.error!r}"


def check_deadline(reader: Reader) -> None:
    """No task can run: a request whose time is over has its outcome, and its reader left, whatever the worker does."""
    if trio.current_time() < reader.deadline:
        return
    generation = reader.generation
    assert generation is not None, "a reader begins with it"
    assert generation.outcome is not None, f"its time is over, and it goes on: {generation}"
    assert reader.over or reader.is_stalled, f"its time is over, and its reader waits: {generation}"


def check_opening(holder: SessionHolder) -> None:
    """No task can run: a session that is not open waits no longer than it may, and only as its holder allows."""
    if not holder.waits:
        return
    assert trio.current_time() < holder.deadline, f"it had {holder.timeout} s to be opened, and waits on: {holder}"
    if not any(pictures_of(content) for _, content in holder.history):  # else it has a slot, and waits for room
        _check_waiting(holder, holder.wait, holder.engine, (Power.AWAKE, Power.RESTARTING))


def check_entering(reader: Reader) -> None:
    """No task can run: a request without a slot waits for a thing that its reader waits for."""
    generation, session = reader.generation, reader.holder.session
    if generation is None or reader.entered or generation.outcome is not None or inside.is_in_flight(generation):
        return
    assert session is not None, "its session is open"
    if inside.request_of(session) is None:  # else the worker has not finished with the request before it
        _check_waiting(reader, reader.wait, reader.holder.engine, (Power.AWAKE,))


def _check_waiting(caller: object, wait: bool | None, engine: Engine, admitting: tuple[Power, ...]) -> None:
    assert wait is not False, f"it is not to wait, and waits: {caller}"
    power = inside.power(engine)
    assert wait or power in admitting, f"the engine is {power.value}, and a caller waits who waits for slots: {caller}"


def check_served(
    holders: Sequence[SessionHolder], readers: Sequence[Reader], calls: Sequence[Call], max_sessions: int
) -> None:
    """Nothing moves, the worker is well, and the engine does not sleep: only a session that finds no slot waits.

    So does a one-shot call. A reader that reads nothing has its answer.
    """
    taken = sum(holder.session is not None and not holder.over for holder in holders)
    waiting: list[object] = [
        reader for reader in readers if not reader.over and not (reader.entered and reader.is_stalled)
    ]
    is_full = taken >= max_sessions
    waiting += [call.name for call in calls if not call.over and not (is_full and call.name in ONE_SHOTS)]
    waiting += [holder for holder in holders if holder.waits and not is_full]
    assert not waiting, f"nothing moves, {taken} of {max_sessions} session slots are taken, and it waits: {waiting}"


def check_aborted(reader: Reader) -> None:
    """Right after an abort: the request does not go on."""
    session, generation = reader.holder.session, reader.generation
    assert session is not None and generation is not None, "only entered requests are aborted"
    assert not inside.is_going(generation), f"it was aborted, and goes on: {session}"


def check_holder(holder: SessionHolder, faults: InjectedFaults) -> None:
    """A session whose scope was left has ended; its history has the turns of its requests, in their order.

    Those of raw token ids are not shown.
    """
    session = holder.session
    if session is None:
        if isinstance(holder.error, SessionEnded):
            assert Cause(holder.error.cause) in faults.causes(holder.life), (
                f"it was not ended in the line, and {holder.error!r}"
            )
        return
    assert not holder.left or session.end_cause is not None, f"{session} was left and has not ended"
    match session.end_cause:
        case Cause.CLIENT:
            assert holder.gave_up, f"{session} has ended, and was not ended"
        case Cause.SHUTDOWN:
            assert faults.closing, f"the engine was not closed, and {session} was ended by it"
        case cause:
            assert cause is None, f"{session} was ended by {cause}"
    found = tuple((message["role"], outline_of(message)) for message in session.history)
    expected = tuple((role, outline(content)) for role, content in committed(holder) if role != RAW)
    assert found == expected, f"the history is {found}, committed was {expected}"


def check_shutdown(worker: SimulatedWorker) -> None:
    """A worker that was well to the end was asked to exit, and holds no session."""
    assert worker.exit_code == 0, f"a healthy worker ended with {worker.exit_code}"
    assert not worker.core.sessions, f"sessions {set(worker.core.sessions)} were never ended"


def check_worker(engine: Engine, worker: SimulatedWorker, sessions: Sequence[Session | inside.SessionActor]) -> None:
    """At rest with a healthy worker: both sides have the same sessions, and nothing is held that is not used."""
    attached = {session.id for session in sessions if inside.is_attached(session)}
    there = set(worker.core.sessions)
    left = [each for each in sessions if inside.is_attached(each) and each.end_cause is not None]
    assert not left, f"ended, and still on the worker: {left}"
    assert there == attached, f"the worker holds sessions {there}, attached are {attached}"
    worker.core.check_integrity()
    statistics = worker.core.statistics()
    assert statistics.num_running == statistics.num_waiting == 0, f"the worker still runs something: {statistics}"
    free, total = statistics.kv_blocks_free + statistics.kv_blocks_cached, worker.core.limits.kv_blocks_total
    assert free == total, f"{total - free} KV blocks have no holder"
    free, slots = statistics.state_slots_free + statistics.state_slots_kept, max(0, worker.core.limits.state_slots - 1)
    assert free == slots, f"{slots - free} state slots have no holder"
    in_windows = worker.core.limits.windows.num_blocks - statistics.window_blocks_free - statistics.window_blocks_cached
    assert not in_windows, f"{in_windows} blocks of windows have no holder"
    in_flight = inside.num_in_flight(engine)
    waiting = inside.num_waiting_for_wake(engine)
    waits = f", but for {waiting} that wait for a wake" if waiting else ""
    assert in_flight == waiting, f"{in_flight} requests are in flight, the worker has none{waits}"


def num_prompt_tokens(reader: Reader) -> int:
    """The tokens of a request's prompt, which was entered."""
    assert reader.generation is not None, "it was entered"
    turns, _ = asked(reader, _committed_before(reader, reader.generation.request_id))
    return len(prompt_ids((*_tools_of(reader), *_computable(turns))))


def _computable(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """All turns; of a mix, which ends without a token, the newest alone."""
    return turns[-1:] if is_mixed(turns) else turns


def _committed_before(reader: Reader, request_id: int) -> tuple[Turn, ...]:
    return committed(reader.holder, request_id)


def committed(holder: SessionHolder, before: float = math.inf) -> tuple[Turn, ...]:
    """In the order in which they were admitted, which need not be that in which they were started."""
    after, turns = next((made for made in reversed(holder.replaced) if made[0] < before), (0, holder.history))
    readers = [reader for reader in holder.readers if after < _request_id(reader) < before]
    for reader in sorted(readers, key=_request_id):
        turns = _followed(reader, turns)
    return turns


def _request_id(reader: Reader) -> int:
    return reader.generation.request_id if reader.generation is not None and reader.entered else 0


def _followed(reader: Reader, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The history after the request: all is added if its outcome was read, a part where that was to be kept."""
    generation = reader.generation
    if generation is None or not reader.entered or generation.outcome is None:
        return turns
    at_leaving = reader.outcome_at_leaving if reader.left else generation.outcome
    finished = at_leaving is not None and at_leaving.is_complete
    aborted = generation.outcome.finish_reason is FinishReason.ABORT
    if not finished and not (aborted and reader.keep_partial and _has_answer(reader, generation.completion)):
        return turns
    prompt, _ = asked(reader, turns)
    completion = generation.completion
    calls = completion.tool_calls
    content = Called(completion.text, calls) if calls else completion.text
    return (*prompt, raw_turn(completion.token_ids) if reader.raw else ("assistant", content))


def _has_answer(reader: Reader, completion: Completion) -> bool:
    """Whether an aborted answer can be kept; with tools it has text or a whole call."""
    is_divided = reader.tools is not None and reader.tools.shown
    return bool(completion.text or completion.tool_calls if is_divided else completion.token_ids)


def _tools_of(reader: Reader) -> tuple[Turn, ...]:
    """The tools of a request, as a turn before its conversation."""
    return () if reader.tools is None else reader.tools.shown


def asked(reader: Reader, turns: tuple[Turn, ...]) -> tuple[tuple[Turn, ...], int]:
    """The conversation with the prompt of the request, and how many of the oldest turns it had to drop."""
    holder = reader.holder
    turns = (*turns, *reader.turns)
    if holder.overflow == "refuse" or any(role == RAW for role, _ in turns):
        return turns, 0
    max_tokens = reader.params.max_tokens
    assert max_tokens is not None, "the machine's requests are for so many"
    return shortened(turns, holder.engine.limits.max_model_len, max_tokens, _tools_of(reader))
