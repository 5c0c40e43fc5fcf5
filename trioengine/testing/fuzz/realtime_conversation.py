"""A Realtime conversation as its client knows it: follows the events of the server, and judges each of them."""

from __future__ import annotations

import itertools
from typing import Any

from trioengine.serve.config import ServeConfig
from trioengine.serve.limits import size_of_json
from trioengine.serve.realtime.outbox import AWAKE
from trioengine.serve.realtime.response import MAX_OUT_OF_BAND
from trioengine.testing.fuzz.conversations import Content, Turn, is_refused, pictures_of, text_of
from trioengine.testing.fuzz.faults import InjectedFaults, Life
from trioengine.testing.fuzz.realtime_response import Asked, FollowedResponse, Owed
from trioengine.testing.fuzz.realtime_shapes import PASSED_OVER, role_of, size_of_item, text_in

_ANSWERS = ("session.updated", "conversation.item.deleted", "conversation.item.truncated", "response.created")


class Conversation:
    """Its events may come over several connections. Raises AssertionError for a wrong one."""

    def __init__(self, config: ServeConfig, max_model_len: int, faults: InjectedFaults) -> None:
        self.session_id = ""  # until the server has sent it
        self.items: dict[str, Turn] = {}
        self.order: list[str] = []
        self.instructions = ""
        self.tools: list[dict[str, Any]] = []
        self.truncation = "auto"
        self.engine_state = AWAKE  # by the last engine.state event
        self.weight_version: int | None = None  # the same; None before the first
        self.responses: dict[str, FollowedResponse] = {}  # the active ones
        self.is_dropped = False  # one of the client's messages
        self._may_begin = False  # after that: a response.create that was remembered before
        self._config = config
        self._max_model_len = max_model_len
        self._faults = faults
        self._numbers = itertools.count(1)
        self._event_ids: set[str] = set()  # of the server
        self._owed: dict[str, Owed] = {}  # events without an answer yet, by their ids
        self._cancels: dict[str, str | None] = {}  # events that are answered if they fail: the responses that they name
        self._in_progress: set[str] = set()  # items
        self._num_beside = 0  # responses beside the conversation that were created

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def response(self) -> str | None:
        """The active response of the conversation."""
        return next((id for id, response in self.responses.items() if not response.asked.is_beside), None)

    def ids_of(self, role: str) -> list[str]:
        """The items of this role."""
        return [id for id in self.order if self.items[id][0] == role]

    @property
    def middle(self) -> str:
        """The middle one of the items that the user sent."""
        of_user = self.ids_of("user")
        return of_user[len(of_user) // 2] if of_user else "none"

    @property
    def last(self) -> str:
        """The last item."""
        return self.order[-1] if self.order else "none"

    @property
    def is_quiet(self) -> bool:
        """Whether all is answered."""
        return not self._owed and not self.responses

    @property
    def size(self) -> int:
        """Bytes that it counts, with instructions and tools, between responses."""
        return self._size() + len(self.instructions) + sum(map(size_of_json, self.tools))

    # ---- events of the client ---------------------------------------------------------------------------------------

    def owe(self, name: str, fields: dict[str, Any]) -> Owed:
        """An event is about to be sent, which is answered."""
        number = next(self._numbers)
        owed = self._owed[f"e{number}"] = Owed(f"e{number}", number, name, Life(self._faults), fields)
        return owed

    def cancel(self, response_id: str | None) -> str:
        """A response.cancel is about to be sent, for this response or for the conversation's; returns its id."""
        number = next(self._numbers)
        self._cancels[f"c{number}"] = response_id
        if response_id is not None and response_id != self.response:
            if response_id in self.responses:
                self.responses[response_id].asked.may_be_cancelled = True
            return f"c{number}"
        active = [response.asked for response in self.responses.values()]
        asked = [owed.asked for owed in self._owed.values() if owed.asked is not None]
        for each in (*asked, *active):
            if not each.is_beside:
                each.may_be_cancelled = True
                if each.cancelled_by is None and (response_id is None or each in active):
                    each.cancelled_by = number
        return f"c{number}"

    def doubt(self) -> None:
        """Another connection begins: events that were sent on those before may be lost."""
        asked = [owed.asked for owed in self._owed.values() if owed.asked is not None]
        for each in (*asked, *(response.asked for response in self.responses.values())):
            each.is_perhaps_cancelled |= each.cancelled_by is not None
            each.cancelled_by = None

    def _forget_lost(self, mark: int) -> None:
        """The event with this number is answered: those before it are lost, but for a response.create.

        That may be remembered behind a cancelled response.
        """
        for owed in [each for each in self._owed.values() if each.number < mark]:
            if self._is_remembered(owed):
                owed.may_be_lost = True
            else:
                del self._owed[owed.id]

    # ---- at rest ----------------------------------------------------------------------------------------------------

    def check_at_rest(self) -> None:
        """All is answered but a response.create behind a cancelled response."""
        if self.response is None:
            self._owed = {id: owed for id, owed in self._owed.items() if not owed.may_be_lost}
        unanswered = [owed.name for owed in self._owed.values() if not self._is_remembered(owed)]
        assert not unanswered, f"never answered: {unanswered}"
        assert not self.is_dropped, "the server dropped a message, and goes on"

    # ---- events of the server ---------------------------------------------------------------------------------------

    def take(self, event: dict[str, Any]) -> None:
        """Take an event, which comes for the first time."""
        assert event["event_id"] not in self._event_ids, f"an id is used again: {event}"
        self._event_ids.add(event["event_id"])
        if self.is_dropped and event["type"] in _ANSWERS:
            is_remembered = self._may_begin and event["type"] == "response.created"
            assert is_remembered, f"a message was dropped, and then {event}"
            self._may_begin = False
        match event["type"]:
            case "session.created":
                self.session_id = event["session"]["id"]
            case "session.updated":
                self._update(self._answered("session.update"), event["session"])
            case "conversation.item.added":
                self._add(event)
            case "conversation.item.done":
                self._finish_item(event)
            case "conversation.item.retrieved":
                asked = self._answered("conversation.item.retrieve").fields["item_id"]
                assert event["item"]["id"] == asked, f"{asked} was asked for, and it is {event['item']}"
                self._check_shown(event["item"])
            case "conversation.item.deleted":
                self._delete(self._answered("conversation.item.delete"), event["item_id"])
            case "conversation.item.truncated":
                self._truncate(self._answered("conversation.item.truncate"), event)
            case "response.created":
                self._begin(event["response"])
            case "response.done":
                self._active(event["response"]["id"]).end(event["response"])
                del self.responses[event["response"]["id"]]
            case "engine.state":
                told = event["state"], event["weight_version"]
                assert told != (self.engine_state, self.weight_version), f"the state does not change: {event}"
                self.engine_state, self.weight_version = told
            case "error":
                self._complain(event["error"])
            case kind if kind.startswith("response."):
                self._active(event["response_id"]).events.take(event)

    def _answered(self, name: str) -> Owed:
        """Events are handled in order: the oldest of this type."""
        id = next((id for id, owed in self._owed.items() if owed.name == name and owed.refused is None), None)
        assert id is not None, f"an answer to a {name} that was never sent"
        owed = self._owed.pop(id)
        self._check_order(owed)
        return owed

    def _check_order(self, answered: Owed) -> None:
        """An event is answered: no other one that was sent before it waits for its answer, but a response.create."""
        late = [each.name for each in self._owed.values() if each.number < answered.number and each.asked is None]
        assert not late, f"{answered.name} is answered before {late}"

    def _update(self, owed: Owed, session: dict[str, Any]) -> None:
        for name, value in owed.fields["session"].items():
            due = None if name in PASSED_OVER else "" if name == "instructions" and value is None else value
            assert session.get(name) == due, f"{name} was set to {value!r}, and is {session.get(name)!r}"
        self.instructions = session["instructions"]
        self.truncation = session["truncation"]
        self.tools = session["tools"]

    # ---- refusals ---------------------------------------------------------------------------------------------------

    def _complain(self, error: dict[str, Any]) -> None:
        assert error["code"] != "internal_error", f"the server has a bug: {error}"
        id = error["event_id"]
        if id is None:
            assert error["code"] == "buffers_full", f"an error about no event: {error}"
            self.is_dropped = True
            self._may_begin = any(map(self._is_remembered, self._owed.values()))
        elif id in self._owed:
            self._check_refused(self._owed.pop(id), error)
        elif id in self._cancels:
            named = self._cancels.pop(id)
            is_true = self.response is None if named is None else named not in self.responses
            assert is_true and error["code"] == "response_cancel_not_active", f"{named} is active, and {error}"
        else:
            found = [response for response in self.responses.values() if response.event_id == id]
            assert found, f"an error about an event that was answered: {error}"
            found[0].error = error

    def _check_refused(self, owed: Owed, error: dict[str, Any]) -> None:
        """As all events come in order, the client has the conversation before its eyes that the server had."""
        if owed.is_mark:
            self._forget_lost(owed.number)
        self._check_order(owed)
        code = error["code"]
        if owed.refused is not None and code == owed.refused[0]:
            assert error["param"] == owed.refused[1], f"it is about {owed.refused[1]}, and refused by {error}"
            return
        contents = [content for _, content in owed.asked.input or ()] if owed.asked is not None else [owed.content]
        if any(is_refused(code, content) for content in contents):
            return
        is_shown = any(pictures_of(content) for content in contents)
        is_excused = code == "buffers_full" or (is_shown and self._faults.excuse(code, owed.life))
        assert is_excused or self._is_true(owed, code), f"{owed.name} {owed.fields} is refused by {error}"

    def _is_true(self, owed: Owed, code: str) -> bool:
        """Whether an event had to be refused with this code."""
        item_id = owed.fields.get("item_id")
        match owed.name, code:
            case "response.create", "conversation_already_has_active_response":
                return owed.asked is not None and not owed.asked.is_beside and not self._follows(owed)
            case "response.create", "too_many_responses":  # one that is done may not have left yet
                return owed.asked is not None and owed.asked.is_beside and self._num_beside >= MAX_OUT_OF_BAND
            case "response.create", "empty_conversation":
                return not self._turns()
            case "response.create", "conversation_too_large":
                return self._size() + 1 > self._config.max_conversation_size
            case "response.create", "item_not_found":
                return owed.asked is not None and owed.asked.reference not in (None, *self.items)
            case "conversation.item.create", "item_not_found":
                return owed.fields.get("previous_item_id") not in ("root", None, *self.items)
            case "conversation.item.create", "duplicate_item":
                return owed.fields["item"].get("id") in self.items
            case "conversation.item.create", "conversation_too_large":
                return self._size() + size_of_item((owed.role, owed.content)) > self._config.max_conversation_size
            case _, "item_not_found":
                return item_id is not None and item_id not in self.items
            case _, "item_in_progress":
                return item_id in self._in_progress
            case "conversation.item.truncate", "invalid_value":
                role, text = self.items.get(str(item_id), ("", ""))
                return role != "assistant" or len(text_of(text)) < owed.fields["text_end"]
        return False

    def _is_remembered(self, owed: Owed) -> bool:
        """Whether it may be a response.create that waits behind a cancelled response."""
        is_in_conversation = owed.asked is not None and not owed.asked.is_beside and owed.refused is None
        may_wait = owed.may_be_lost or self._follows(owed, perhaps=True)
        return is_in_conversation and self.response is not None and may_wait

    def _follows(self, owed: Owed, *, perhaps: bool = False) -> bool:
        """Whether a response of the conversation had to begin, or had to be remembered behind a cancelled one.

        One that is remembered is not answered yet, and was asked for before. `perhaps` allows for events that are lost.
        """
        if self.response is None:
            return True
        active = self.responses[self.response].asked
        is_cancelled = active.cancelled_by is not None and active.cancelled_by < owed.number
        creates = [each for each in self._owed.values() if each.asked is not None and each.refused is None]
        before = [each for each in creates if each.number < owed.number and each.asked and not each.asked.is_beside]
        if perhaps:
            is_cancelled |= active.is_perhaps_cancelled
            before = [each for each in before if not each.may_be_lost]
        return is_cancelled and not before

    # ---- the conversation -------------------------------------------------------------------------------------------

    def _turns(self) -> tuple[Turn, ...]:
        turns = tuple(self.items[id] for id in self.order if self.items[id][1])
        return (("system", self.instructions), *turns) if self.instructions else turns

    def _size(self) -> int:
        """Bytes that the conversation counts, without an item in progress."""
        return sum(size_of_item(turn) for id, turn in self.items.items() if id not in self._in_progress)

    def _add(self, event: dict[str, Any]) -> None:
        item, previous = event["item"], event["previous_item_id"]
        due = self.order[-1] if self.order else None
        if role_of(item) != "assistant":
            owed = self._answered("conversation.item.create")
            content, place = owed.content, owed.fields.get("previous_item_id", due)
            due = None if place == "root" else place
            assert item["id"] == owed.fields["item"].get("id", item["id"]), f"{owed.fields} is answered by {event}"
            assert role_of(item) == owed.role, f"{owed.fields} is answered by {event}"
            size = self._size() + size_of_item((owed.role, content))
            assert size <= self._config.max_conversation_size, f"an item is added to a conversation of {size} bytes"
        else:
            content = ""
            self._in_progress.add(item["id"])
            self._of_item(item["id"]).events.take(event)
        assert previous == due, f"an item comes after {previous}, and not after {due}: {event}"
        self._insert(item, content, previous)

    def _of_item(self, id: str) -> FollowedResponse:
        found = [response for response in self.responses.values() if response.events.item_id == id]
        assert found, f"no response has the item {id}"
        return found[0]

    def _delete(self, owed: Owed, id: str) -> None:
        assert id == owed.fields["item_id"], f"{owed.fields} is answered by the end of {id}"
        self.order.remove(id)
        del self.items[id]

    def _truncate(self, owed: Owed, event: dict[str, Any]) -> None:
        named = {name: event[name] for name in owed.fields}
        assert named == owed.fields and event["audio_end_ms"] == 0, f"{owed.fields} is answered by {event}"
        role, text = self.items[event["item_id"]]
        assert isinstance(text, str), "it has no pictures"
        self.items[event["item_id"]] = role, text[: event["text_end"]]

    def _insert(self, item: dict[str, Any], content: Content, previous: str | None) -> None:
        assert item["id"] not in self.items, f"item {item['id']} is added twice"
        self.items[item["id"]] = role_of(item), content
        self.order.insert(0 if previous is None else self.order.index(previous) + 1, item["id"])

    def _begun(self, response: dict[str, Any]) -> tuple[Owed, Asked]:
        """The oldest response.create of this kind: one beside the conversation overtakes one that is remembered."""
        is_beside = response["conversation_id"] is None
        for owed in list(self._owed.values()):
            if owed.asked is not None and owed.refused is None and owed.asked.is_beside == is_beside:
                del self._owed[owed.id]
                if not owed.may_be_lost or owed.asked.metadata == response["metadata"]:  # which names it
                    return owed, owed.asked
        raise AssertionError("an answer to a response.create that was never sent")

    def _begin(self, response: dict[str, Any]) -> None:
        id = response["id"]
        owed, asked = self._begun(response)
        assert asked.is_beside or self.response is None, f"{id} begins while {self.response} is active"
        self._num_beside += asked.is_beside
        turns = self._turns()
        given = asked.input if asked.reference is None else (self.items[asked.reference],)
        if given is not None:
            turns = (*([("system", self.instructions)] if self.instructions else ()), *given)
        self.responses[id] = FollowedResponse(
            response,
            owed.id,
            asked,
            turns,
            {id: content for id, (_, content) in self.items.items()},
            self._max_model_len,
            self._faults,
            owed.life,
            is_truncated=self.truncation == "auto",
            tool_form=self._config.tool_call_parser,
        )
        assert len(self.responses) <= MAX_OUT_OF_BAND + 1, f"{len(self.responses)} responses are active"

    def _finish_item(self, event: dict[str, Any]) -> None:
        item = event["item"]
        at = self.order.index(item["id"])
        due = self.order[at - 1] if at else None
        assert event["previous_item_id"] == due, f"the item is behind {due}, and {event}"
        if role_of(item) == "assistant":
            self._of_item(item["id"]).events.take(event)
            self._in_progress.discard(item["id"])
            self.items[item["id"]] = "assistant", text_in(item)
            return
        assert item["status"] == "completed", f"an item of the user's is {item}"
        self._check_shown(item)

    def _check_shown(self, item: dict[str, Any]) -> None:
        """Check an item; one in progress has the deltas that were sent before it."""
        id = item["id"]
        role, content = self.items[id]
        assert (item["status"] == "in_progress") == (id in self._in_progress), f"its status is wrong: {item}"
        if id in self._in_progress:
            content = self._of_item(id).events.text
        num_pictures = sum(part["type"] == "input_image" for part in item.get("content", ()))
        shown = role_of(item), num_pictures, text_in(item)
        assert shown == (role, len(pictures_of(content)), text_of(content)), f"{content} is shown as {item}"

    def _active(self, id: str) -> FollowedResponse:
        assert id in self.responses, f"{id} is not active"
        return self.responses[id]
