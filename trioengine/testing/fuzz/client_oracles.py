"""Invariants of the client library, from outside; each check raises AssertionError."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import trio

from trioengine.actors.engine import Engine
from trioengine.client.connection import CLOSE_TIMEOUT
from trioengine.core.errors import RequestRejected
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, Completion, FinishReason
from trioengine.testing.fuzz import inside, inside_client
from trioengine.testing.fuzz.answers import reference
from trioengine.testing.fuzz.callers import Reader
from trioengine.testing.fuzz.client_callers import OneShot, RemoteHolder, RemoteReader, User, check_error
from trioengine.testing.fuzz.conversations import (
    Called,
    Content,
    Result,
    Turn,
    chat_content,
    check_seen,
    is_failed,
    is_refused,
    outline,
    outline_of,
    pictures_of,
    prompt_of,
    shortened,
    text_of,
)
from trioengine.testing.fuzz.faults import InjectedFaults
from trioengine.testing.fuzz.inside import SessionActor
from trioengine.testing.fuzz.promptness import Wait
from trioengine.testing.fuzz.tools import Offered, parts_in, parts_of_answer
from trioengine.testing.fuzz.world import LIMITS

MOST_SILENCES = (
    4  # of 20 s, until the library notices: a ping, its answer, and where they are cut by jumps of the clock
)
LAST = "~"  # after every id of a response


def check_text(
    completion: Completion,
    turns: tuple[Turn, ...],
    params: SamplingParams,
    causes: AbstractSet[Cause],
    tools: Offered | None = None,
) -> None:
    """The answer is the model's to these turns; or a part of it, by one of the causes that there were.

    With tools it is divided into text and calls.
    """
    prompt, images = prompt_of((*_shown(tools), *turns))
    text, reason = completion.text, completion.finish_reason
    if text:
        check_seen(images)
    room = LIMITS.max_model_len - len(prompt)
    length = min(room, params.max_tokens or room)
    answer = functools.partial(
        reference,
        prompt,
        length,
        ignore_eos=params.ignore_eos,
        min_tokens=params.min_tokens,
        images=images,
        grammar=None if tools is None else tools.grammar,
    )
    expected, found = answer(params.stop), parts_in(text, completion.tool_calls)
    if reason is FinishReason.ABORT:
        assert completion.cause in causes, f"aborted by {completion.cause}, there were {causes or 'no causes'}"
        free = answer(()).text  # an abort gives the text that may begin a stop string
        parts = (parts_of_answer(tools, free[:end], is_aborted=True) for end in range(len(free), -1, -1))
        is_part = found in parts or found == parts_of_answer(tools, expected.text)  # the abort has crossed the end
        assert is_part, f"{found} is not part of the model's answer {free!r}"
        return
    due, due_reason = parts_of_answer(tools, expected.text), expected.finish_reason
    if due.calls and due_reason is FinishReason.STOP:
        due_reason = FinishReason.TOOL_CALLS
    assert (found, reason) == (due, due_reason), (
        f"the answer is {found}, {reason}, the model's is {due}, {due_reason}: {expected.text!r}"
    )
    if tools is not None and reason in (FinishReason.STOP, FinishReason.TOOL_CALLS) and not params.stop:
        tools.check_complete(expected.text)
    assert completion.cause is None, "only an abort has a cause"
    usage = completion.usage
    counted = usage.prompt_tokens, usage.completion_tokens
    due_tokens = len(prompt), len(expected.token_ids)
    assert counted == due_tokens, f"{counted} tokens of prompt and answer are counted, there are {due_tokens}: {usage}"
    assert 0 <= usage.cached_tokens < len(prompt), (
        f"{usage.cached_tokens} of {len(prompt)} tokens of the prompt are cached"
    )


def check_reader(reader: Reader, faults: InjectedFaults) -> None:
    """A request that is over: one outcome, and the model's answer to its history; or an error that has its reason."""
    generation, holder = reader.generation, reader_holder(reader)
    turns, num_dropped = asked(reader)
    if isinstance(reader.error, RequestRejected):
        _check_rejected(reader.error, turns, faults, reader.tools)
    if generation is None or not reader.entered:
        is_refused = reader.error is not None or reader.scope.cancel_called
        assert is_refused, f"it was not entered, and raised no error: {generation}"
        return
    outcome = generation.outcome
    assert outcome is not None, f"{reader} is over without an outcome"
    if reader.outcome_at_leaving is not None:
        assert outcome is reader.outcome_at_leaving, f"{reader.outcome_at_leaving} became {outcome}"
    if (error := outcome.error) is not None:
        assert reader.error is None or repr(reader.error) == repr(error), f"{reader.error!r} instead of {error!r}"
        if isinstance(error, RequestRejected):
            _check_rejected(error, turns, faults, reader.tools)
        else:
            check_error(error, holder.line, reader.life, faults, wait=reader.wait, deadline=reader.deadline)
        return
    completion = generation.completion
    check_text(completion, turns, reader.params, faults.causes(reader.life) | reader.causes, reader.tools)
    if outcome.is_complete:
        dropped = completion.dropped_turns
        assert dropped == num_dropped, f"{dropped} turns are dropped, {num_dropped} are too many"


def check_one_shot(call: OneShot, faults: InjectedFaults) -> None:
    """The same of a request in a session of its own."""
    turns: tuple[Turn, ...] = (("user", call.content),)
    if isinstance(call.error, RequestRejected):
        _check_rejected(call.error, turns, faults)
    elif call.completion is not None:
        check_text(call.completion, turns, call.params, faults.causes(call.life) | call.causes)
    else:
        assert call.error is not None or call.scope.cancel_called, "it is over, and has neither answer nor error"


def _check_rejected(
    error: RequestRejected, turns: tuple[Turn, ...], faults: InjectedFaults, tools: Offered | None = None
) -> None:
    content = turns[-1][1]
    match error.code:
        case "empty_prompt":
            assert not (text_of(content) or pictures_of(content)), f"{content!r} is not empty, and {error!r}"
        case "context_length_exceeded":
            length = len(prompt_of((*_shown(tools), *turns)).token_ids)
            assert length >= LIMITS.max_model_len, f"the prompt has {length} tokens, and {error!r}"
        case code:
            is_known = is_refused(code, content) or is_failed(code, turns, faults.dropped)
            assert is_known, f"{content} is refused: {error!r}"


def check_holder(holder: RemoteHolder) -> None:
    """A session whose scope was left has ended; its history has the turns of its requests, in their order."""
    session = holder.session
    if session is None:
        return
    assert not holder.left or session.end_cause is not None, f"{session} was left and has not ended"
    assert session.end_cause in (None, Cause.CLIENT), f"{session} was ended by {session.end_cause}"
    assert session.end_cause is None or holder.gave_up, f"{session} has ended, and was not ended"
    if any(not reader.over or not _is_settled(reader) for reader in holder.readers):
        return
    found = [(message["role"], _given_of(message)) for message in session.history]
    expected = [(role, _as_given(content)) for role, content in committed(holder)]
    may_differ = holder.overflow != "refuse" and (holder.line.is_harmed or session.end_cause is not None)
    if may_differ:  # the server did not get to report the turns that it dropped, of those that the model sees
        found, expected = ([turn for turn in turns if turn[1]] for turns in (found, expected))
        found = found[len(found) - len(expected) :]
    assert found == expected, f"the history is {found}, committed was {expected}"


def _given_of(message: Mapping[str, Any]) -> object:
    """The content of a message in a history, with its calls, or with the id of the call that it answers."""
    return outline_of(message) if {"tool_calls", "tool_call_id"} & {*message} else message["content"]


def _as_given(content: Content) -> object:
    """The same of a content."""
    return outline(content) if isinstance(content, Called | Result) else chat_content(content)


def check_nothing_left(holder: RemoteHolder) -> None:
    """At rest, with a worker that is well: a session without calls has no request, if it was heard."""
    if holder.session is None or holder.is_busy:
        return
    if holder.line.is_well or holder.session.end_cause is not None:
        left = {name: count for name, count in inside_client.left_in(holder.session).items() if count}
        assert not left, f"all calls of {holder.session} are over, and left are {left}"
    if holder.line.is_well and holder.session.end_cause is None:
        unanswered = inside_client.num_unanswered(holder.session)
        assert not unanswered, f"{unanswered} events of {holder.session} are never answered"


def check_same(holder: RemoteHolder, items: Mapping[str, list[inside_client.Outline]]) -> None:
    """At rest, and all calls of a session are over: the server has the client's conversation, and nothing more."""
    if holder.session is None or holder.session.id is None or not (holder.is_open and holder.line.is_well):
        return
    if not holder.is_busy and all(_is_settled(reader) for reader in holder.readers):
        history, at_server = inside_client.outlines(holder.session), items.get(str(holder.session.id))
        assert history in (None, at_server), f"the client's history is {history}, the server has {at_server}"


def check_woken(readers: Iterable[RemoteReader]) -> None:
    """At rest: nothing keeps these readers, but a connection that was harmed."""
    for reader in readers:
        waits = reader.is_stalled or not (reader.entered or reader.wait is False)
        assert waits or not reader_holder(reader).line.is_well, f"it is never woken: {reader.generation}"


def check_gone(callers: Iterable[RemoteHolder | OneShot]) -> None:
    """At rest: of those that are over no connection is open."""
    for caller in callers:
        if caller.over and not caller.line.is_harmed:
            left = [peer for peer in caller.line.peers if not peer.is_over]
            assert not left, f"it is over, and {len(left)} of its connections are open: {caller}"


def check_state(holder: RemoteHolder, shown: str) -> None:
    """A session that can hear it has reported the engine's state, and nothing keeps one that is to end or open."""
    if holder.over or not holder.line.is_well:
        return
    waits = holder.session is not None or holder.wait is not False
    assert waits and not holder.leave.is_set(), f"it is never done: {holder}"
    if holder.is_open:
        state = (["awake", *holder.line.states])[-1]
        assert state == shown, f"{holder.session} hears {state}, the engine is {shown}"


def _is_settled(reader: Reader) -> bool:
    return reader.generation is None or not reader.entered or inside.is_settled(reader.generation)


def check_prompt(reader: RemoteReader) -> None:
    """No task can run: a request whose time is over, or whose connection is silent, does not go on."""
    if reader.over or reader.is_stalled:
        return
    line = reader_holder(reader).line
    assert trio.current_time() < reader.deadline, f"its time is over, and its reader waits: {reader.generation}"
    assert line.silences < MOST_SILENCES, f"nothing has arrived for long, and its reader waits: {reader.generation}"
    is_woken = reader.left or not (reader.entered and inside_client.has_unread(reader.generation))
    assert is_woken, f"there is text to read, and its reader waits: {reader.generation}"


def check_left(holder: RemoteHolder) -> None:
    """No task can run: a session that is left, or gave up, does not go on for longer than it may."""
    if holder.over:
        return
    now = trio.current_time()
    assert not holder.scope.cancel_called, f"it is cancelled, and goes on: {holder.session}"
    assert holder.session is not None or not holder.ended, f"it is ended, and is being opened: {holder.handle}"
    assert holder.session is not None or now < holder.opened_by, "its time is over, and its session is being opened"
    if holder.leave.is_set() and holder.session is not None:
        holder.left_at = min(holder.left_at, now)
    assert now <= holder.left_at + CLOSE_TIMEOUT, f"it is left, and goes on: {holder.session}"


def check_stopped(holders: Sequence[RemoteHolder], sessions: Iterable[SessionActor]) -> None:
    """No task can run: the server goes on with no request of which it has heard that it is stopped."""
    going = {session.label: session for session in sessions if inside.phase(session) in inside.GOING}
    for holder in holders if going else ():
        session = holder.handle
        if session is None or session.id is None or not holder.line.is_well or holder.line.peers[-1].moves:
            continue
        is_wanted = any(not (reader.over or reader.has_outcome or reader.aborted) for reader in holder.readers)
        assert is_wanted or session.id not in going, f"{session} has no request, and the server: {going[session.id]}"


def check_names(holders: Sequence[RemoteHolder], model: str) -> None:
    """Sessions have ids of their own, and the server's model; requests have ids of their own at their client."""
    sessions = [holder.handle for holder in holders if holder.session is not None and holder.handle is not None]
    assert len({session.id for session in sessions}) == len(sessions), f"ids are used again: {sessions}"
    assert all(session.model == model for session in sessions), f"sessions of another model than {model}: {sessions}"
    names = [
        (id(holder.line.user), reader.generation.request_id)
        for holder in holders
        for reader in holder.readers
        if reader.generation is not None and reader.entered
    ]
    assert len(set(names)) == len(names), f"ids of requests are used again: {names}"


def check_usage(reader: Reader, answers: Sequence[Completion]) -> None:
    """A whole answer has the same usage as an answer of the server's engine."""
    generation = reader.generation
    if generation is None or generation.outcome is None or not generation.outcome.is_complete:
        return
    usage = generation.completion.usage
    parts = parts_in(generation.completion.text, generation.completion.tool_calls)
    found = any(
        usage == replace(each.usage, queue_time=0.0, prefill_time=0.0)
        and parts_of_answer(reader.tools, each.text) == parts
        for each in answers
    )
    assert found, f"the client has {usage}, the engine {[each.usage for each in answers]}"


def waits_of_readers(readers: Iterable[RemoteReader], engine: Engine) -> Iterator[Wait]:
    """Requests that are asked again after a refusal, though they are taken by now, or are not to wait any more."""
    is_awake = inside.is_admitting(engine)
    is_free = inside.num_in_flight(engine) < engine.config.max_num_seqs and not inside.num_waiting(engine)
    going = {session.label for session in inside.sessions(engine) if inside.phase(session) in inside.GOING}
    for reader in readers:
        handle = reader_holder(reader).handle
        # it waits for the first part of its answer
        is_taken = reader.tools is not None and handle is not None and handle.id in going
        is_waiting = not (reader.entered or is_taken or reader.is_stalled) and reader_holder(reader).line.is_well
        if is_waiting and (is_free if is_awake else reader.wait is not True):
            seconds = max(engine.config.restart_delays) + 1.0  # the longest that the server names in a refusal
            yield Wait(("client", id(reader), is_awake), seconds, f"it waits: {reader.generation}")


def check_call(call: OneShot) -> None:
    """No task can run: a one-shot whose time is over, or that is cancelled, does no more than close its session."""
    if call.over:
        return
    now = trio.current_time()
    assert not call.scope.cancel_called, f"it is cancelled, and goes on: {call.label}"
    if now >= call.deadline:
        call.late_at = min(call.late_at, now)
    assert now <= call.late_at + CLOSE_TIMEOUT, f"its time is over, and it goes on: {call.label}"


def check_user(user: User) -> None:
    """No task can run: a scope of `connect` that is left does not go on for longer than it may."""
    if user.over:
        return
    now = trio.current_time()
    assert not user.is_cut, "connect() is cancelled, or its callback has raised, and it goes on"
    if user.leave.is_set():
        user.left_at = min(user.left_at, now)
    assert now <= user.left_at + CLOSE_TIMEOUT, "connect() is left, and goes on"


def committed(holder: RemoteHolder, before: str = "") -> tuple[Turn, ...]:
    """The conversation after the requests with responses, in the server's order; or before the one with this id."""
    before = before or LAST
    after, turns = next(made for made in reversed(holder.histories) if made[0] < before)
    readers = {_response_id(reader): reader for reader in holder.readers}
    for id in sorted(id for id in readers if after < id < before):
        turns = _followed(readers[id], turns)
    return turns


def _response_id(reader: Reader) -> str:
    return inside_client.response_id(reader.generation)


def _followed(reader: Reader, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The history after the request: all is added if it was complete, a part where that was to be kept."""
    generation = reader.generation
    if generation is None or not reader.entered or generation.outcome is None or generation.outcome.error is not None:
        return turns
    text, calls = generation.completion.text, generation.completion.tool_calls
    if not generation.outcome.is_complete and not (reader.keep_partial and (text or calls)):
        return turns
    given, num_dropped = _given(reader, turns)
    messages = (*turns, *reader.turns)
    shown = [turn for turn in messages if _is_shown(turn)]
    dropped = shown[: len(shown) - len(given)] if num_dropped else []  # the oldest of those shown
    kept = [turn for turn in messages if not (dropped and turn is dropped[0] and dropped.pop(0))]
    return (*kept, ("assistant", Called(text, calls) if calls else text))


def asked(reader: Reader) -> tuple[tuple[Turn, ...], int]:
    """The messages that the server gives to the model, and how many of the oldest turns it had to drop."""
    return _given(reader, committed(reader_holder(reader), _response_id(reader)))


def _given(reader: Reader, turns: tuple[Turn, ...]) -> tuple[tuple[Turn, ...], int]:
    turns = (*(turn for turn in turns if _is_shown(turn)), *reader.turns)
    if reader.holder.overflow == "refuse":
        return turns, 0
    assert reader.params.max_tokens is not None, "the machine's requests are for so many"
    return shortened(turns, LIMITS.max_model_len, reader.params.max_tokens, _shown(reader.tools))


def _shown(tools: Offered | None) -> tuple[Turn, ...]:
    return () if tools is None else tools.shown


def _is_shown(turn: Turn) -> bool:
    """A message without a text, and without pictures, is not shown to the model."""
    return bool(text_of(turn[1]) or pictures_of(turn[1]))


def reader_holder(reader: Reader) -> RemoteHolder:
    assert isinstance(reader.holder, RemoteHolder), "it has a session over a connection"
    return reader.holder
