"""The admission of a request: reserve, prepare, commit.

To reserve and to commit are single synchronous steps of the session; the gate is asked in each. Between them the prompt
is prepared, which changes nothing: whoever leaves there gives a slot back, and the worker never hears of it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import trio

from trioengine.actors.generation import Generation
from trioengine.actors.image_parts import put_images
from trioengine.actors.images import RequestImages, image_inputs
from trioengine.actors.waiting_line import NOT_NOW, waits_for
from trioengine.actors.worker_session import Posting
from trioengine.core.arguments import PromptPlaces
from trioengine.core.errors import EngineError, FrameTooLarge, RequestRejected, TimedOut
from trioengine.core.lifecycle import Phase
from trioengine.core.messages import AddMessage
from trioengine.core.sampling_params import SamplingParams, prompt_limit
from trioengine.core.types import Cause
from trioengine.text.conversation import Prepared, Prompt, newest_turn, prompt_length
from trioengine.text.output import OutputText

if TYPE_CHECKING:
    from trioengine.actors.engine_state import EngineState
    from trioengine.actors.session import Session


class Admission:
    """One request on its way in."""

    def __init__(self, engine: EngineState, session: Session, generation: Generation) -> None:
        self._engine = engine
        self._gate = engine.gate
        self._session = session
        self._generation = generation
        self._images = RequestImages(engine, wait=generation.wait, deadline=generation.deadline)

    async def run(self) -> None:
        """Raises why the request is refused. An abort on the way ends this early, without an error."""
        session, generation, has_ended = self._session, self._generation, False
        with generation.entering:
            try:
                await self._reserve()
                await self._prepare()
                await self._commit()
            except TimedOut as exc:
                session.abort_request(generation, Cause.TIMEOUT)
                exc.completion = generation.completion
                raise
            except Exception as exc:
                if generation.outcome is not None and isinstance(exc, EngineError):
                    return  # it was aborted before it was refused
                session.refuse(generation, exc)
                raise
            except BaseException:
                has_ended = generation.outcome is None and session.end_cause is not None  # the session, in the line
                session.abort_request(generation, session.end_cause or Cause.CLIENT)
                raise
            finally:
                self._images.unpin()
        if has_ended:
            session.check_idle()

    async def _reserve(self) -> None:
        """Wait for a slot, as far as asked to, and take it. Raises TimedOut if the deadline passes first."""
        session, generation = self._session, self._generation
        await session.open_for_request()
        with trio.move_on_at(generation.deadline.at):
            while session.phase is Phase.STOPPING and session.generation is not None:
                await session.generation.settled.wait()
        if session.phase is Phase.STOPPING:
            session.abort_request(generation, Cause.TIMEOUT)
        reserve = partial(session.reserve, generation)
        await self._gate.admit(self._gate.requests, reserve, wait=generation.wait, deadline=generation.deadline)

    @property
    def _is_over(self) -> bool:
        """Whether the request was aborted on the way."""
        return self._session.generation is not self._generation

    async def _prepare(self) -> None:
        generation = self._generation
        if self._is_over:
            return
        (prompt, generation.prompt), (media, generation.media) = (generation.prompt, None), (generation.media, ())
        places = PromptPlaces.of(prompt, media)
        with places.naming():
            self._check_length(prompt)
            prompt, sources = self._engine.take_images(prompt, media)
            del media
            if sources:
                prompt = put_images(prompt, await self._images.admit(sources))
                self._check_length(prompt)
            prepared = await self._prepared(prompt)
            self._check(prepared, generation.params)
        images = [dataclasses.replace(image, name=places.name(image.name)) for image in prepared.images]
        self._images.pin(images)
        generation.prepared = dataclasses.replace(prepared, images=tuple(images))
        model = self._engine.model
        generation.answer = OutputText(model.tokenizer, generation.params, model.eos_token_ids)

    @property
    def _drops_turns(self) -> bool:
        return self._session.overflow == "drop_oldest_turns"

    def _check_length(self, prompt: Prompt) -> None:
        least = newest_turn(prompt) if self._drops_turns else prompt
        self._session.conversation.check_length(least, self._engine.limits.max_model_len)

    async def _prepared(self, prompt: Prompt) -> Prepared:
        conversation, ports = self._session.conversation, self._engine.ports
        limit = prompt_limit(self._engine.limits.max_model_len, self._generation.params.max_tokens)
        prepare = partial(
            conversation.prepare, prompt, limit if self._drops_turns else None, self._session.retention_ratio
        )
        if prompt_length(prompt) + conversation.size > ports.thread_threshold:
            prepared: Prepared = await ports.run_in_thread(prepare)
            return prepared
        await trio.lowlevel.checkpoint()
        return prepare()

    def _check(self, prepared: Prepared, params: SamplingParams) -> None:
        limit = self._engine.limits.max_model_len
        if len(prepared.token_ids) >= limit:
            raise RequestRejected(
                "context_length_exceeded",
                f"prompt: {len(prepared.token_ids)} tokens leave no room for an answer in a context of {limit}",
                param="prompt",
            )
        vocab_size = self._engine.limits.vocab_size
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(params, name):
                if token_id >= vocab_size:
                    raise RequestRejected(
                        "invalid_value",
                        f"{name}: token {token_id} is beyond the vocabulary of {vocab_size}",
                        param=name,
                    )

    async def _commit(self) -> None:
        try:
            self._commit_now()
        except NOT_NOW as exc:
            if not waits_for(exc, self._generation.wait):
                raise
            await self._gate.commits.wait(self._commit_now)

    def _commit_now(self) -> None:
        if self._is_over:
            return
        link, prepared = self._gate.committing_link(), self._generation.prepared
        assert prepared is not None, "commit follows prepare"
        try:
            posting = Posting.of(link, self._message(prepared), prepared.images)
        except FrameTooLarge as exc:
            raise RequestRejected("too_large", str(exc), param="prompt") from exc
        self._session.commit(self._generation, posting)

    def _message(self, prepared: Prepared) -> AddMessage:
        session_id = self._session.id
        assert session_id is not None, "commit follows reserve"
        base = self._session.worker_session.base(prepared.token_ids)
        return AddMessage(
            session=session_id,
            request=self._generation.request_id,
            base=base,
            token_ids=prepared.token_ids[base:],
            params=self._resolved(self._generation.params, len(prepared.token_ids)),
            eos_token_ids=tuple(self._engine.model.eos_token_ids),
            images=image_inputs(prepared.images, self._generation.params.cache_salt, self._gate.mint),
        )

    def _resolved(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """With max_tokens within the context, and a seed."""
        room = self._engine.limits.max_model_len - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._engine.ports.mint_seed() if params.seed is None else params.seed
        return params.replace_valid(
            max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens), seed=seed, stop=()
        )
