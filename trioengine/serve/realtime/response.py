"""A response: what was asked, how far it is, and how the client is told."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trioengine.actors.generation import Completion, Generation
from trioengine.actors.kept_images import KeptImages
from trioengine.actors.session import Session
from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import Cause, FinishReason, Usage
from trioengine.serve.problem import Problem, RequestAborted, problem_of
from trioengine.serve.realtime.item import Item, ItemStatus, Role
from trioengine.serve.realtime.items import Items, num_turns, size_of_messages
from trioengine.serve.realtime.outbox import DeltaTemplate, Outbox, new_id
from trioengine.serve.realtime.truncation import Truncation
from trioengine.text.turns import Turns


class ResponseStatus(enum.Enum):
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class Order:
    """The request of a response.create: the conversation as it was then, and how to go on from it.

    `item_ids` are those of the messages; None for the instructions. `left_out` are the items that responses before it
    left out of their prompts for good.
    """

    messages: list[dict[str, Any]]
    item_ids: list[str | None]
    params: SamplingParams
    truncation: Truncation
    max_output_tokens: int | str
    metadata: Mapping[str, str] | None = None
    event_id: str | None = None  # the client's
    left_out: tuple[Item, ...] = ()
    is_lasting: bool = False  # its cut: responses after it leave the same items out

    def dropped_item_ids(self, count: int) -> list[str]:
        """The ids of the items in the oldest `count` turns of its messages."""
        ids = (self.item_ids[index] for index in Turns.of(self.messages).dropped(count))
        return [id for id in ids if id is not None]


@dataclass(slots=True)
class Response:
    """One response; every change of it is told to the client in the same step.

    The bytes of its order's messages are charged to its outbox's account until it ends. Their images are kept until
    then, or until `release`.
    """

    order: Order
    outbox: Outbox
    conversation_id: str | None
    items: Items | None  # of its conversation; None: it belongs to none
    id: str = field(default_factory=lambda: new_id("resp"))
    status: ResponseStatus = ResponseStatus.IN_PROGRESS
    status_details: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    item: Item | None = None
    dropped_turns: int = 0  # that were left out of its prompt
    dropped_item_ids: list[str] = field(default_factory=list)  # the items in them
    cancelled: bool = False  # by its client; a finish that is on its way wins
    session: Session | None = None  # while it answers, from before the prompt is prepared
    generation: Generation | None = None  # while it runs
    _delta: DeltaTemplate | None = None
    _num_charged: int = 0  # bytes
    _kept: KeptImages | None = None

    def begin(self) -> None:
        self._kept = KeptImages(self.order.messages)
        self._charge(size_of_messages(self.order.messages))
        self.outbox.put("response.created", response=self.to_json())

    def cancel(self) -> None:
        """Its client wants no more of it."""
        self.cancelled = True
        if self.generation is not None:
            self.generation.abort()

    def abandon(self) -> None:
        """Its client has gone: the engine session that answers it ends at once."""
        if self.session is not None:
            self.session.end(Cause.DISCONNECT)

    def release(self) -> None:
        """Keep its images no more; harmless when they were released."""
        if self._kept is not None:
            self._kept.release()

    def begin_item(self) -> None:
        """The engine has taken the request: its item is there, still empty."""
        self.item = item = Item(Role.ASSISTANT, [], status=ItemStatus.IN_PROGRESS)
        self._delta = DeltaTemplate("response.output_text.delta", **self._place(item))
        self.outbox.put("response.output_item.added", response_id=self.id, output_index=0, item=item.to_json())
        if self.items is not None:
            previous = self.items.append_answer(item)
            self.outbox.put("conversation.item.added", previous_item_id=previous, item=item.to_json())
        item.grow("")
        self._put("response.content_part.added", item, part=_part(""))

    def add_text(self, delta: str) -> None:
        assert self.item is not None and self._delta is not None, "text comes after begin_item"
        self.item.grow(delta)
        self.outbox.put_delta(self._delta, delta)

    def finish(self, completion: Completion) -> None:
        """The engine's outcome, whatever it is but an error."""
        self.usage = _usage(completion.usage)
        self._note_dropped(completion.dropped_turns)
        match completion.finish_reason:
            case FinishReason.STOP:
                self._end(ResponseStatus.COMPLETED)
            case FinishReason.LENGTH:
                self._end(ResponseStatus.INCOMPLETE, reason="max_output_tokens")
            case _ if completion.cause is Cause.CLIENT:
                self._end(ResponseStatus.CANCELLED, reason="client_cancelled")
            case _:
                self.fail(problem_of(RequestAborted(completion.cause)))

    def _note_dropped(self, count: int) -> None:
        """These turns, beside those that were left out before."""
        left_out, dropped = self.order.left_out, self.order.dropped_item_ids(count)
        self.dropped_turns = count + num_turns(left_out)
        self.dropped_item_ids = [*(item.id for item in left_out), *dropped]
        if self.order.is_lasting and self.items is not None:
            self.items.leave_out(dropped)

    def fail(self, problem: Problem) -> None:
        """It ends with an error event; what was sent until then stays, as an incomplete item."""
        self.outbox.put_error(problem, self.order.event_id)
        self._end(ResponseStatus.FAILED, error={"type": problem.type, "code": problem.code, "message": problem.message})

    def _end(self, status: ResponseStatus, **details: Any) -> None:
        self._charge(-self._num_charged)
        self.release()
        self.status = status
        self.status_details = {"type": status.value, **details} if details else None
        if self.item is not None:
            self._end_item(self.item)
        self.outbox.put("response.done", response=self.to_json())

    def _charge(self, size: int) -> None:
        self._num_charged += size
        self.outbox.held.charge(size)

    def _end_item(self, item: Item) -> None:
        item.status = ItemStatus.COMPLETED if self.status is ResponseStatus.COMPLETED else ItemStatus.INCOMPLETE
        self._put("response.output_text.done", item, text=item.text)
        self._put("response.content_part.done", item, part=_part(item.text))
        if self.items is not None:
            self.items.finish_answer(item)
            self.outbox.put("conversation.item.done", previous_item_id=self.items.before(item), item=item.to_json())
        self.outbox.put("response.output_item.done", response_id=self.id, output_index=0, item=item.to_json())

    def _put(self, name: str, item: Item, **fields: Any) -> None:
        self.outbox.put(name, **self._place(item), **fields)

    def _place(self, item: Item) -> dict[str, Any]:
        return {"response_id": self.id, "item_id": item.id, "output_index": 0, "content_index": 0}

    def to_json(self) -> dict[str, Any]:
        item = None if self.status is ResponseStatus.IN_PROGRESS else self.item
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": self.status.value,
            "status_details": self.status_details,
            "output": [] if item is None else [item.to_json()],
            "conversation_id": self.conversation_id,
            "output_modalities": ["text"],
            "max_output_tokens": self.order.max_output_tokens,
            "usage": self.usage,
            "metadata": self.order.metadata,
            "dropped_turns": self.dropped_turns,
            "dropped_item_ids": self.dropped_item_ids,
        }


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {"cached_tokens": usage.cached_tokens, "text_tokens": usage.prompt_tokens},
        "output_token_details": {"text_tokens": usage.completion_tokens},
    }
