"""The output of a response: the answer of the model as items, and the events about them."""

from __future__ import annotations

from typing import Any

from trioengine.serve.realtime.item import FunctionCallItem, Item, ItemStatus, MessageItem, Role
from trioengine.serve.realtime.items import Items
from trioengine.serve.realtime.outbox import DeltaTemplate, Outbox
from trioengine.text.tool_calls import CallArguments, CallBegin, Part, ToolCallParser, ToolForm


class Output:
    """The items of one response; each change queues an event in the same step.

    Without tools, the answer is one message. With a `form` of tool calls it is divided into messages and calls, each of
    which begins with its first part; an answer without any part is an empty message.
    """

    def __init__(self, response_id: str, outbox: Outbox, conversation: Items | None, form: ToolForm | None) -> None:
        """`conversation` gets the items; None: out of band."""
        self.items: list[Item] = []
        self._response_id = response_id
        self._outbox = outbox
        self._conversation = conversation
        self._parser = None if form is None else ToolCallParser(form)
        self._has_begun = False
        self._open: Item | None = None  # the last item, unless it is closed
        self._delta: DeltaTemplate | None = None  # of its deltas

    def begin(self) -> None:
        """Begin, as the engine has accepted the request."""
        self._has_begun = True
        if self._parser is None:
            self._begin_message()

    def add(self, text: str) -> None:
        """Add a piece of the answer. Raises ClientError if the conversation has no room for another item."""
        self._take([text] if self._parser is None else self._parser.feed(text))

    def finish(self, *, is_aborted: bool) -> None:
        """Add the part of the answer that was not decided, as nothing follows. Raises ClientError as `add`.

        The beginning of a call that was aborted is left out, as the arguments have not begun.
        """
        if self._parser is not None:
            self._take(self._parser.finish(is_aborted=is_aborted))

    def close(self, *, is_completed: bool) -> None:
        """Close the last item at the end of the response; a call is complete if it has all of its arguments."""
        if self._has_begun and not self.items:
            self._begin_message()
        if isinstance(self._open, FunctionCallItem):
            is_completed = self._parser is not None and not self._parser.is_cut
        self._close(is_completed=is_completed)

    def to_json(self) -> list[dict[str, Any]]:
        return [item.to_json() for item in self.items]

    def _take(self, parts: list[Part]) -> None:
        for part in parts:
            match part:
                case CallBegin(name):
                    self._begin_call(name)
                case CallArguments(text):
                    self._grow(text)
                case _:
                    if not isinstance(self._open, MessageItem):
                        self._begin_message()
                    self._grow(part)

    def _grow(self, delta: str) -> None:
        assert self._open is not None and self._delta is not None, "a delta is of an item"
        self._open.grow(delta)
        self._outbox.put_delta(self._delta, delta)

    # ---- items ------------------------------------------------------------------------------------------------------

    def _begin_message(self) -> None:
        item = MessageItem(Role.ASSISTANT, [], status=ItemStatus.IN_PROGRESS)
        self._begin(item)
        self._delta = DeltaTemplate("response.output_text.delta", **self._place(item))
        item.grow("")
        self._put("response.content_part.added", item, part=_part(""))

    def _begin_call(self, name: str) -> None:
        item = FunctionCallItem(name, status=ItemStatus.IN_PROGRESS)
        self._begin(item)
        self._delta = DeltaTemplate("response.function_call_arguments.delta", **self._place(item))

    def _begin(self, item: Item) -> None:
        """Begin an item; room for the first one was checked with the request."""
        self._close(is_completed=True)
        if self.items and self._conversation is not None:
            self._conversation.check_room(item.size, None)
        self.items.append(item)
        self._open = item
        self._put_item("response.output_item.added", item)
        if self._conversation is not None:
            previous = self._conversation.append_answer(item)
            self._outbox.put("conversation.item.added", previous_item_id=previous, item=item.to_json())

    def _close(self, *, is_completed: bool) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = ItemStatus.COMPLETED if is_completed else ItemStatus.INCOMPLETE
        if isinstance(item, MessageItem):
            self._put("response.output_text.done", item, text=item.text)
            self._put("response.content_part.done", item, part=_part(item.text))
        elif isinstance(item, FunctionCallItem):
            name = "response.function_call_arguments.done"
            self._put(name, item, name=item.name, arguments=item.arguments)
        if self._conversation is not None:
            self._conversation.finish_answer(item)
            previous = self._conversation.before(item)
            self._outbox.put("conversation.item.done", previous_item_id=previous, item=item.to_json())
        self._put_item("response.output_item.done", item)

    def _put_item(self, event: str, item: Item) -> None:
        place = {"response_id": self._response_id, "output_index": len(self.items) - 1}
        self._outbox.put(event, **place, item=item.to_json())

    def _put(self, event: str, item: Item, **fields: Any) -> None:
        self._outbox.put(event, **self._place(item), **fields)

    def _place(self, item: Item) -> dict[str, Any]:
        place = {"response_id": self._response_id, "item_id": item.id, "output_index": len(self.items) - 1}
        return {**place, **({"call_id": item.call_id} if isinstance(item, FunctionCallItem) else {"content_index": 0})}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
