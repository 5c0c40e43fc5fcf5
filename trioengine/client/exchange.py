"""The request that a session has at its server: the session's calls, and the server's events.

All changes are synchronous methods, which the session and the connection call; events for the server are put into the
posts. Only `ask` waits.
"""

from __future__ import annotations

import itertools
from typing import Any

import trio

from trioengine.actors.waiting_line import NOT_NOW, waits_for
from trioengine.client.conversation import Conversation
from trioengine.client.generation import Generation, Stage
from trioengine.client.outcomes import length_of, outcome_of, usage_of
from trioengine.client.posts import Posts
from trioengine.client.problems import error_of, placed
from trioengine.client.prompt import Message, rendered
from trioengine.core.errors import EngineError, Outcome, RequestRejected
from trioengine.core.types import Cause, FinishReason


class Exchange:
    """One request at a time, and the conversation that its turn becomes a part of."""

    def __init__(self, posts: Posts, conversation: Conversation) -> None:
        self.generation: Generation | None = None  # until it is settled
        self._posts = posts
        self._conversation = conversation
        self._ids = itertools.count(1)  # of events

    # ---- the session's calls --------------------------------------------------------------------------------------

    def begin(self, generation: Generation, messages: list[Message], events: dict[str, str]) -> None:
        """Make this the request, and post the items of its prompt, which were prepared."""
        self.generation = generation
        generation.messages, generation.item_ids = messages, list(events)
        self._conversation.create(events)

    async def ask(self, generation: Generation, fields: dict[str, Any], events: dict[str, str]) -> None:
        """Post the request, and wait until the engine takes it, refuses it, or it is aborted."""
        while True:
            generation.ask_id, generation.response_id = f"ask_{next(self._ids)}", None
            generation.problem = generation.refusal = generation.spoiled = None
            generation.stage, generation.cancel_sent = Stage.ASKED, False
            self._posts.put(rendered("response.create", generation.ask_id, {"response": fields}))
            await generation.answered()
            refusal = generation.refusal
            if refusal is None:
                return
            if not (isinstance(refusal, NOT_NOW) and waits_for(refusal, generation.wait)):
                self._conclude(generation, Outcome(FinishReason.ERROR, error=refusal))
                self._settle(generation)
                return
            if generation.spoiled is None:
                await trio.sleep(refusal.retry_after)
            else:  # all of the prompt goes again, so that it is in order
                self._conversation.delete(generation.item_ids)
                await trio.sleep(refusal.retry_after)
                self._conversation.create(events)

    def abort(self, generation: Generation, cause: Cause) -> bool:
        """Abort the request if it has no outcome yet. Returns whether this call aborts it."""
        if generation.is_stopping:
            return False
        generation.abort_cause = cause
        self._cancel(generation)
        return True

    def leave(self, generation: Generation) -> None:
        """The reader goes: without an outcome, the turn is taken back (or kept in part) at once."""
        if not generation.settled.is_set():
            self._conclude(generation, Outcome(FinishReason.ABORT, generation.abort_cause or Cause.CLIENT))
            self._cancel(generation)

    def end(self, outcome: Outcome) -> None:
        """End the request with this outcome, or as aborted if it was aborted before."""
        if self.generation is not None:
            cause = self.generation.abort_cause
            self._conclude(self.generation, outcome if cause is None else Outcome(FinishReason.ABORT, cause))
            self._settle(self.generation)

    def _cancel(self, generation: Generation) -> None:
        """Cancel the request at the server, or end it here if it was not posted."""
        if generation.stage is Stage.NONE:
            self._conclude(generation, Outcome(FinishReason.ABORT, generation.abort_cause or Cause.CLIENT))
            self._settle(generation)
        elif not generation.cancel_sent:
            generation.cancel_sent = True
            self._posts.put(rendered("response.cancel", f"cancel_{next(self._ids)}", {}))

    # ---- the server's events --------------------------------------------------------------------------------------

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event of the server."""
        generation = self.generation
        match event["type"]:
            case "response.created" if generation is not None:
                generation.stage, generation.response_id = Stage.CREATED, event["response"]["id"]
            case "response.output_item.added" if generation is not None:
                generation.stage, generation.answer_id = Stage.ADMITTED, event["item"]["id"]
                generation.notify()
            case "response.output_text.delta" if generation is not None:
                generation.receive(event["delta"])
            case "response.done" if generation is not None:
                self._done(generation, event["response"])
            case "conversation.item.done":
                self._conversation.answered(f"create_{event['item']['id']}")
            case "conversation.item.deleted":
                self._conversation.answered(f"delete_{event['item_id']}")
            case "error":
                self._complained(event["error"])

    def _complained(self, problem: dict[str, Any]) -> None:
        event_id, generation = problem.get("event_id"), self.generation
        self._conversation.answered(event_id, error_of(problem))
        if generation is None or event_id is None:
            return
        if event_id == generation.ask_id:
            generation.problem = self._named(generation, error_of(problem), problem.get("param"))
            if generation.stage is Stage.ASKED:  # it is not even begun
                self._refused(generation, generation.spoiled or generation.problem)
        elif generation.outcome is not None or generation.spoiled is not None:
            return  # it is over, or another message was refused before
        elif event_id in {f"create_{id}" for id in generation.item_ids}:
            generation.spoiled = self._named(generation, error_of(problem), event_id.removeprefix("create_"))
            self._cancel(generation)

    def _named(self, generation: Generation, error: EngineError, item_id: object) -> EngineError:
        """An error about this item, with the place by the call's arguments, or in the history."""
        if item_id not in generation.item_ids:
            return self._conversation.named(error, item_id) if isinstance(item_id, str) else error
        index = generation.item_ids.index(item_id)
        named = placed(error, f"prompt[{index}]", generation.messages[index])
        return generation.places.rejection(named) if isinstance(named, RequestRejected) else named

    def _done(self, generation: Generation, response: dict[str, Any]) -> None:
        if generation.spoiled is not None:
            self._refused(generation, generation.spoiled)
            return
        if not generation.is_timed_out:  # the error has its completion
            generation.usage, generation.dropped_turns = usage_of(response), response.get("dropped_turns", 0)
        outcome = outcome_of(response, generation.abort_cause, generation.problem)
        if outcome.error is not None:
            self._refused(generation, outcome.error)
            return
        self._over(generation, outcome)
        if generation.is_kept and generation.answer_id is not None and length_of(response) > len(generation.text):
            self._conversation.truncate(generation.answer_id, len(generation.text))
        if generation.is_kept:
            self._conversation.drop(response.get("dropped_item_ids", ()))

    def _refused(self, generation: Generation, error: EngineError) -> None:
        if generation.spoiled is not None and generation.answer_id is not None:
            self._conversation.delete([generation.answer_id])
            generation.answer_id = None
        if generation.answer_id is None and not generation.is_stopping:
            generation.stage, generation.refusal = Stage.NONE, error
            generation.notify()
        elif generation.abort_cause is not None:
            self._over(generation, Outcome(FinishReason.ABORT, generation.abort_cause))
        else:
            self._over(generation, Outcome(FinishReason.ERROR, error=error))

    def _over(self, generation: Generation, outcome: Outcome) -> None:
        """The server is done with the response."""
        generation.stage = Stage.NONE
        self._conclude(generation, outcome)
        if generation.answer_id is not None and not generation.is_kept:
            self._conversation.delete([generation.answer_id])
        self._settle(generation)

    # ---- the outcome ----------------------------------------------------------------------------------------------

    def _conclude(self, generation: Generation, outcome: Outcome) -> None:
        """Decide the outcome, if that is not done, and with it whether the turn is committed."""
        if generation.outcome is not None:
            return
        is_partial = outcome.finish_reason is FinishReason.ABORT and generation.keep_partial and generation.text != ""
        generation.is_kept = is_partial or outcome.is_complete
        if generation.is_kept and generation.answer_id is not None:
            messages = [*generation.messages, {"role": "assistant", "content": generation.text}]
            self._conversation.commit(messages, [*generation.item_ids, generation.answer_id])
        else:
            self._conversation.delete(generation.item_ids)
        generation.decide(outcome)

    def _settle(self, generation: Generation) -> None:
        if self.generation is generation:
            self.generation = None
        generation.settle()
