"""Admission: the way in, of a session (`open_session`) and of a request (`admit`: reserve, prepare, commit).

Reserving and committing are single synchronous steps; the gate decides in each. Between them the prompt is prepared,
which changes nothing: a caller that leaves there gives its slot back, and the worker never gets the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import trio

from trioengine.actors.images import RequestImages, put_images
from trioengine.actors.media import Media
from trioengine.actors.request import Request
from trioengine.actors.runtime import Runtime
from trioengine.actors.session_actor import SessionActor
from trioengine.actors.waiting_line import NOT_NOW, waits_for
from trioengine.core.checks import PromptPlaces
from trioengine.core.errors import EngineError, RequestRejected, TimedOut
from trioengine.core.grammar import Grammar
from trioengine.core.lifecycle import Phase
from trioengine.core.sampling_params import ResolvedParams, SamplingParams, check_room, prompt_limit, resolved_params
from trioengine.core.tools import AskedTools
from trioengine.core.types import Cause
from trioengine.text.conversation import Conversation, Prepared, Prompt, check_length, newest_turn
from trioengine.text.output import OutputText
from trioengine.text.tool_answer import ToolAnswer
from trioengine.text.tools import Tools, tools_of

# ---- a session ------------------------------------------------------------------------------------------------------


async def open_session(runtime: Runtime, session: SessionActor) -> None:
    """Take a session slot, and make the conversation; cancelled, the session has no slot.

    Raises the refusal, RequestRejected for a bad history, and SessionEnded if the session was ended meanwhile.
    """
    gate, opening = runtime.gate, session.opening
    with runtime.sessions.opening(session):
        await gate.admit(gate.sessions, partial(runtime.adopt, session), wait=opening.wait, deadline=opening.deadline)
    images = RequestImages(runtime.images, wait=opening.wait, deadline=opening.deadline)
    try:
        history, sources = runtime.take_images(opening.history, where="history")
        opening.history = None
        history = put_images(history, await images.admit(sources))
        if session.end_cause is not None:  # a thread that copies images is not cancelled
            raise session.ended_error()
        session.begin(Conversation(runtime.files.tokenizer, history, opening.variables))
    except BaseException:
        session.end()
        raise
    finally:
        images.unpin()


# ---- a request ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    """One request on its way in. Its prompt and media are dropped, and their bytes with them, when it is prepared."""

    runtime: Runtime
    session: SessionActor
    request: Request
    prompt: Any  # not checked yet, as the media
    media: Any
    images: RequestImages | None = None  # None for a prompt without images

    def open_images(self) -> RequestImages:
        if self.images is None:
            request = self.request
            self.images = RequestImages(self.runtime.images, wait=request.wait, deadline=request.deadline)
        return self.images

    @property
    def is_over(self) -> bool:
        """Whether the request was aborted on the way."""
        return self.session.request is not self.request


async def admit(
    runtime: Runtime, session: SessionActor, request: Request, prompt: Prompt, media: Sequence[Media]
) -> None:
    """Submit a request with this prompt. Raises the refusal; an abort on the way ends this early, without an error.

    Cancelled, the request is aborted.
    """
    entry = _Entry(runtime, session, request, prompt, media)
    del prompt, media  # this frame lives as long as the request is on its way in
    await _admit_observed(entry)


async def admit_behind(runtime: Runtime, session: SessionActor, request: Request) -> None:
    """Submit a request with its leader's prompt when the leader has its first token, or is over; as `admit`."""
    await _admit_observed(_Entry(runtime, session, request, None, ()))


async def _admit_observed(entry: _Entry) -> None:
    runtime, session, request = entry.runtime, entry.session, entry.request
    request.times.begin()
    session.waiting[request] = None
    try:
        await _admit(entry)
    except EngineError as exc:
        for observer in runtime.observers:
            observer.request_refused(request, exc)
        raise
    finally:
        del session.waiting[request]


async def _admit(entry: _Entry) -> None:
    session, request, has_ended = entry.session, entry.request, False
    with request.entering:
        try:
            await _reserve(entry)
            if not entry.is_over:
                await (_prepare(entry) if request.leader is None else _follow(entry, request.leader))
            await _commit(entry)
        except TimedOut as exc:
            session.abort_request(request, Cause.TIMEOUT)
            exc.completion = request.result()
            raise
        except Exception as exc:
            if request.outcome is not None and isinstance(exc, EngineError):
                return  # it was aborted before it was refused
            session.refuse(request, exc)
            raise
        except BaseException:
            has_ended = request.outcome is None and session.end_cause is not None  # the session, in the line
            session.abort_request(request, session.end_cause or Cause.CLIENT)
            raise
        finally:
            if entry.images is not None:
                entry.images.unpin()
    if has_ended:
        session.check_idle()


async def _reserve(entry: _Entry) -> None:
    """Wait for a slot, as far as the caller allows, and take it. Raises TimedOut if the deadline passes first."""
    session, request, gate = entry.session, entry.request, entry.runtime.gate
    if session.opening.by_request:
        await open_session(entry.runtime, session)
    if session.phase is Phase.STOPPING:
        with trio.move_on_at(request.deadline.at):
            while session.phase is Phase.STOPPING and session.request is not None:
                await session.request.settled.wait()
        if session.phase is Phase.STOPPING:
            session.abort_request(request, Cause.TIMEOUT)
    await gate.admit(gate.requests, partial(session.reserve, request), wait=request.wait, deadline=request.deadline)


async def _prepare(entry: _Entry) -> None:
    """Copy the images, render and tokenize the prompt, and check that it fits."""
    runtime, request = entry.runtime, entry.request
    (prompt, entry.prompt), (media, entry.media) = (entry.prompt, None), (entry.media, ())
    _check_task(runtime, request.params)
    places = PromptPlaces.of(prompt, media)
    with places.naming():
        _check_length(entry, prompt)
        prompt, sources = runtime.take_images(prompt, media)
        del media
        if sources:
            prompt = put_images(prompt, await entry.open_images().admit(sources))
            _check_length(entry, prompt)
        tools = None if request.tools is None else _tools(entry, request.tools)
        prepared = await _prepared(entry, prompt, tools)
        if request.grammar is not None:
            await _check_grammar(entry, request.grammar)
        _check(runtime, prepared, request.params)
    if prepared.images:
        images = tuple(replace(image, name=places.name(image.name)) for image in prepared.images)
        prepared = replace(prepared, images=images)
    _take_prepared(entry, prepared)


def _check_task(runtime: Runtime, params: SamplingParams) -> None:
    """Raise RequestRejected for a prompt to answer or to score, if the model only embeds texts."""
    embeds = runtime.files.model.embedding_size is not None
    if embeds and not params.embeds:
        hint = "use engine.embed, or POST /v1/embeddings"
        raise RequestRejected(
            "generation_not_supported", f"the model is an embedding model, and answers nothing: {hint}"
        )
    assert embeds or not params.embeds, "checked before the request was made"


def _tools(entry: _Entry, asked: AskedTools) -> Tools:
    """Return the tools in the form of the model, and get ready for calls in the answer."""
    request, runtime = entry.request, entry.runtime
    tools = tools_of(asked, runtime.files.tokenizer.tool_form)
    request.grammar = tools.grammar or request.grammar
    request.tool_answer = ToolAnswer(tools.form, f"call_{runtime.ports.mint_seed():016x}_")
    return tools


async def _check_grammar(entry: _Entry, grammar: Grammar) -> None:
    try:
        await entry.runtime.grammars.check(grammar)
    except RequestRejected as exc:
        raise entry.request.grammar_error(exc) from None


async def _follow(entry: _Entry, leader: Request) -> None:
    """Wait for the leader's first token, or its end, and take its prompt; the request is aborted where it has none."""
    await trio.lowlevel.checkpoint()
    while leader.outcome is None and not leader.num_tokens:
        await leader.changed.wait()
    prepared, request = leader.prepared, entry.request
    if prepared is None:
        cause = leader.outcome.cause if leader.outcome is not None else None
        entry.session.abort_request(request, cause or Cause.CLIENT)
        return
    _take_prepared(entry, prepared)


def _take_prepared(entry: _Entry, prepared: Prepared) -> None:
    request, model = entry.request, entry.runtime.files.model
    if prepared.images:
        entry.open_images().pin(prepared.images)
    request.prepared = prepared
    request.eos_token_ids = tuple(model.eos_token_ids)
    request.output = OutputText(model.tokenizer, request.params, model.eos_token_ids)
    request.texts = request.output.texts if request.tool_answer is None else request.tool_answer.texts


def _check_length(entry: _Entry, prompt: Prompt) -> None:
    least = newest_turn(prompt) if entry.session.overflow == "drop_oldest_turns" else prompt
    check_length(least, entry.runtime.limits.max_model_len, entry.session.conversation.tokenizer)


async def _prepared(entry: _Entry, prompt: Prompt, tools: Tools | None) -> Prepared:
    session, ports = entry.session, entry.runtime.ports
    limit = None
    if session.overflow == "drop_oldest_turns":
        limit = prompt_limit(entry.runtime.limits.max_model_len, entry.request.params.max_tokens)
    conversation = session.conversation
    prepare = partial(conversation.prepare, prompt, limit, session.retention_ratio, tools)
    if conversation.work(prompt, tools) > ports.thread_threshold:
        prepared: Prepared = await ports.run_in_thread(prepare)
        return prepared
    await trio.lowlevel.checkpoint()
    return prepare()


def _check(runtime: Runtime, prepared: Prepared, params: SamplingParams) -> None:
    """Raise RequestRejected for a prompt without room for an answer, and for token ids beyond the vocabulary."""
    limit, vocab_size = runtime.limits.max_model_len, runtime.limits.vocab_size
    check_room(len(prepared.token_ids), limit, params.max_tokens)
    for name in ("stop_token_ids", "logit_bias"):
        for token_id in getattr(params, name):
            if token_id >= vocab_size:
                problem = f"{name}: token {token_id} is beyond the vocabulary of {vocab_size}"
                raise RequestRejected("invalid_value", problem, param=name)


async def _commit(entry: _Entry) -> None:
    """Post the request; if no worker can take it yet, wait for one as far as the caller allows."""
    commit, gate = partial(_commit_now, entry), entry.runtime.gate
    try:
        commit()
    except NOT_NOW as exc:
        if entry.request.leader is None and not waits_for(exc, entry.request.wait):
            raise
        await gate.commits.wait(commit)
    entry.runtime.effects.drain()


def _commit_now(entry: _Entry) -> None:
    if entry.is_over:
        return
    runtime, request = entry.runtime, entry.request
    link = runtime.gate.committing_link(is_quarantined=runtime.recovery.has_suspects)
    request.resolved = _resolved(runtime, request)
    entry.session.commit(request, link)


def _resolved(runtime: Runtime, request: Request) -> ResolvedParams:
    """Return the parameters with the defaults of model and engine, max_tokens within the context, and a seed."""
    params, defaults = request.params, runtime.files.sampling_defaults
    room = runtime.limits.max_model_len - request.num_prompt_tokens
    max_tokens = params.max_tokens
    if max_tokens is None:
        max_tokens = max(int(defaults.get("max_tokens", room)), params.min_tokens)
    max_tokens = min(max_tokens, room)
    seed = runtime.ports.mint_seed() if params.seed is None else params.seed
    min_tokens = min(params.min_tokens, max_tokens)
    drafted = params.num_speculative_tokens
    if drafted is None:
        drafted = runtime.config.num_speculative_tokens
    numbers = {"max_tokens": max_tokens, "min_tokens": min_tokens, "seed": seed, "num_speculative_tokens": drafted}
    return resolved_params(params, defaults, **numbers, stop=(), grammar=request.grammar)
