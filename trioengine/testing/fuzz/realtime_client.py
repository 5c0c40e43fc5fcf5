"""A Realtime client that follows the conversation and judges every event."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trioengine.core.types import FinishReason
from trioengine.serve.realtime.connection import GOING_AWAY, TRY_AGAIN_LATER
from trioengine.serve.realtime.outbox import AWAKE
from trioengine.serve.realtime.response import MAX_OUT_OF_BAND
from trioengine.testing.fuzz.conversations import (
    Answer,
    Content,
    Turn,
    check_seen,
    is_failed,
    is_refused,
    item_content,
    pictures_of,
    prompt_of,
    reference,
    shortened,
    text_of,
)
from trioengine.testing.fuzz.faults import InjectedFaults, Life
from trioengine.testing.simulated_peer import PeerState, SimulatedClient


@dataclass
class Asked:
    """A response.create that was sent."""

    max_tokens: int
    is_beside: bool = False  # it belongs to no conversation
    input: tuple[Turn, ...] | None = None  # in place of the conversation
    may_be_cancelled: bool = False


class FollowedResponse:
    """A response from response.created to response.done. Raises AssertionError for events that are wrong."""

    def __init__(
        self,
        id: str,
        event_id: str,
        asked: Asked,
        turns: tuple[Turn, ...],
        contents: Mapping[str, Content],
        max_model_len: int,
        faults: InjectedFaults,
        life: Life,
        *,
        is_truncated: bool,
    ) -> None:
        self.id = id
        self.event_id = event_id
        self.asked = asked
        self.error: dict[str, Any] = {"code": None}  # of an error event about it
        self._contents = contents  # of the items that it goes on from, by their ids
        self._turns, self._dropped_turns = turns, 0
        if is_truncated:
            self._turns, self._dropped_turns = shortened(turns, max_model_len, asked.max_tokens)
        self._num_dropped = len(turns) - len(self._turns)  # messages
        self._prompt, self._images = prompt_of(self._turns)
        self._room = max_model_len - len(self._prompt)
        self._faults = faults
        self._life = life
        self._text = ""

    def add(self, delta: str) -> None:
        self._text += delta

    def check_text(self, text: str) -> None:
        assert text == self._text, f"the deltas give {self._text!r}, and then {text!r}"

    def end(self, response: dict[str, Any]) -> None:
        """Check response.done: the answer is the model's, or a part of it for a reason."""
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        self.check_text(text)
        length = min(self._room, self.asked.max_tokens)
        expected = reference(self._prompt, length, (), images=self._images) if self._room > 0 else None
        if text:
            check_seen(self._images)
        if response["status"] != "failed":
            tokens = {name: response["usage"][f"{name}_tokens"] for name in ("total", "input", "output")}
            assert tokens["total"] == tokens["input"] + tokens["output"], f"the usage is {tokens}"
            dropped = response["dropped_turns"], len(response["dropped_item_ids"])
            assert dropped == (self._dropped_turns, self._num_dropped), f"dropped are {dropped} turns and items"
        self._check_status(response, text, expected)
        assert expected is None or expected.text.startswith(text), (
            f"{text!r} is not part of the model's answer {expected.text!r}"
        )

    def _check_status(self, response: dict[str, Any], text: str, expected: Answer | None) -> None:
        match response["status"]:
            case "failed":
                code = response["status_details"]["error"]["code"]
                assert self.error["code"] == code, f"it failed by {code}, the error before it was {self.error}"
                is_excused = expected is None or self._faults.excuse(code, self._life)
                assert is_excused or self._is_failed_by_an_image(code), f"nothing may fail by {self.error}"
            case "cancelled":
                assert self.asked.may_be_cancelled, "it was not cancelled"
            case "completed" | "incomplete" as status:
                finish_reason = FinishReason.STOP if status == "completed" else FinishReason.LENGTH
                assert expected is not None, "there was no room for an answer"
                assert (text, finish_reason) == (expected.text, expected.finish_reason), (
                    f"the response is {text!r} and {status}, the model's is {expected.text!r}, {expected.finish_reason}"
                )

    def _is_failed_by_an_image(self, code: str) -> bool:
        """Whether it has one that it must fail for; the error names the item that has it."""
        if self.asked.input is not None:  # the client has no ids of its items
            return is_failed(code, self._turns, self._faults.dropped)
        return is_failed(code, [("user", self._contents.get(self.error["param"], ""))], self._faults.dropped)


PATH = "/v1/realtime"
_REFUSALS = ("buffers_full", "conversation_already_has_active_response", "too_many_responses")
_ANSWERS = ("session.updated", "conversation.item.deleted", "conversation.item.truncated", "response.created")


class RealtimeClient(SimulatedClient):
    """Assertions are raised from where its bytes arrive."""

    def __init__(self, max_model_len: int, faults: InjectedFaults) -> None:
        super().__init__(PATH, self._told)
        self.items: dict[str, Turn] = {}
        self.order: list[str] = []
        self.instructions = ""
        self.truncation = "auto"
        self.num_events = 0
        self.engine_state = AWAKE  # by the last engine.state event
        self.responses: dict[str, FollowedResponse] = {}  # the active ones
        self._max_model_len = max_model_len
        self._faults = faults
        self._ids = itertools.count(1)
        self._owed: dict[str, str] = {}  # events without an answer yet: event id -> type
        self._asked: dict[str, Asked] = {}  # of these, the responses
        self._lives: dict[str, Life] = {}  # of all events that it has sent
        self._said: dict[str, Content] = {}  # and the contents of the items
        self._is_dropped = False  # one of its messages

    @property
    def response(self) -> str | None:
        """The active response of the conversation."""
        for id, response in self.responses.items():
            if not response.asked.is_beside:
                return id
        return None

    # ---- events of the client ---------------------------------------------------------------------------------------

    def ask(self, name: str, *, size: int = 0, **fields: Any) -> str:
        """Send an event of at least so many bytes, which is answered; returns its id."""
        id = f"e{next(self._ids)}"
        self._owed[id] = name
        self._lives[id] = Life(self._faults)
        self.send(json.dumps({"type": name, "event_id": id, **fields}).ljust(size))
        return id

    def say(self, content: Content) -> None:
        self._said[self.ask("conversation.item.create", item=_user_item(content))] = content

    def respond(self, max_tokens: int) -> None:
        self._create(Asked(max_tokens))

    def respond_beside(self, max_tokens: int, content: Content | None = None) -> None:
        """From the conversation, or from this alone."""
        self._create(Asked(max_tokens, is_beside=True, input=None if content is None else (("user", content),)))

    def _create(self, asked: Asked) -> None:
        response: dict[str, Any] = {"max_output_tokens": asked.max_tokens}
        if asked.is_beside:
            response["conversation"] = "none"
        if asked.input is not None:
            response["input"] = [_user_item(content) for _, content in asked.input]
        self._asked[self.ask("response.create", response=response)] = asked

    def truncate(self, text_end: int) -> bool:
        """Truncate the last answer; False if there has not been one."""
        answers = [id for id in self.order if self.items[id][0] == "assistant"]
        place: dict[str, Any] = {"item_id": answers[-1] if answers else "none", "content_index": 0}
        self.ask("conversation.item.truncate", **place, text_end=text_end)
        return bool(answers)

    def cancel(self) -> None:
        """It is answered by an error only, where there is nothing to cancel."""
        active = (response.asked for response in self.responses.values())
        for asked in (*self._asked.values(), *active):
            asked.may_be_cancelled |= not asked.is_beside
        self.send(json.dumps({"type": "response.cancel"}))

    def cancel_beside(self) -> bool:
        """Cancel one of them; False if none is active."""
        response = next((response for response in self.responses.values() if response.asked.is_beside), None)
        if response is not None:
            response.asked.may_be_cancelled = True
        id = "none" if response is None else response.id
        self.send(json.dumps({"type": "response.cancel", "response_id": id}))
        return response is not None

    @property
    def is_active(self) -> bool:
        return self.response is not None

    # ---- responses --------------------------------------------------------------------------------------------------

    def check_at_rest(self) -> None:
        """Everything is answered; a response may be in progress."""
        if self.peer_state is PeerState.WELL and self.accepted and self.can_send:
            assert not self._owed, f"never answered: {self._owed}"
            assert not self._is_dropped, "the server dropped a message, and goes on"

    def on_goodbye(self, code: int) -> None:
        assert code != TRY_AGAIN_LATER or self._is_dropped, "no message was dropped"
        assert code != GOING_AWAY or not self.responses, f"a goodbye in the middle of {set(self.responses)}"

    def _told(self, event: dict[str, Any]) -> None:
        assert event["sequence_number"] == self.num_events, f"event {self.num_events} is {event}"
        assert not self._is_dropped or event["type"] not in _ANSWERS, f"a message was dropped, and then {event}"
        self.num_events += 1
        match event["type"]:
            case "session.updated":
                self._answered("session.update")
                self.instructions = event["session"]["instructions"]
                self.truncation = event["session"]["truncation"]
            case "conversation.item.added":
                item = event["item"]
                content: Content = _text_in(item)
                if item["role"] == "user":
                    content = self._said.pop(self._answered("conversation.item.create"))
                self._insert(item, content, event["previous_item_id"])
            case "conversation.item.done":
                self._finish_item(event["item"])
            case "conversation.item.deleted":
                self._answered("conversation.item.delete")
                self.order.remove(event["item_id"])
                del self.items[event["item_id"]]
            case "conversation.item.truncated":
                self._answered("conversation.item.truncate")
                role, text = self.items[event["item_id"]]
                assert isinstance(text, str), "it has no pictures"
                self.items[event["item_id"]] = role, text[: event["text_end"]]
            case "response.created":
                self._begin(event["response"])
            case "response.output_text.delta":
                self._active(event["response_id"]).add(event["delta"])
            case "response.output_text.done":
                self._active(event["response_id"]).check_text(event["text"])
            case "response.done":
                self._end(event["response"])
            case "engine.state":
                self.engine_state = event["state"]
            case "error":
                self._complain(event["error"])

    def _answered(self, name: str) -> str:
        """Events are handled in order: the oldest of this type."""
        id = next((id for id, asked in self._owed.items() if asked == name), None)
        assert id is not None, f"an answer to a {name} that was never sent"
        del self._owed[id]
        return id

    def _complain(self, error: dict[str, Any]) -> None:
        assert error["code"] != "internal_error", f"the server has a bug: {error}"
        id = error["event_id"]
        if id is None and error["code"] == "buffers_full":
            self._is_dropped = True
        if id in self._owed:
            del self._owed[id]
            asked = self._asked.pop(id, None)
            refused = asked.input or () if asked is not None else (("user", self._said.pop(id, "")),)
            self._check_refused(error["code"], [content for _, content in refused], self._lives[id])
        for response in self.responses.values():
            if response.event_id == id:
                response.error = error

    def _check_refused(self, code: str, contents: list[Content], life: Life) -> None:
        """An event with pictures is refused where one of them is bad, or where they exceed the budget."""
        if any(pictures_of(content) for content in contents) and code not in _REFUSALS:
            is_bad = any(is_refused(code, content) for content in contents)
            assert is_bad or self._faults.excuse(code, life), f"{contents} is refused by {code}"

    def _insert(self, item: dict[str, Any], content: Content, previous: str | None) -> None:
        assert item["id"] not in self.items, f"item {item['id']} is added twice"
        self.items[item["id"]] = item["role"], content
        self.order.insert(0 if previous is None else self.order.index(previous) + 1, item["id"])

    def _begin(self, response: dict[str, Any]) -> None:
        event_id = self._answered("response.create")
        asked, id = self._asked.pop(event_id), response["id"]
        assert asked.is_beside or self.response is None, f"{id} begins while {self.response} is active"
        assert asked.is_beside == (response["conversation_id"] is None), f"{id} belongs elsewhere: {response}"
        turns = tuple(self.items[id] for id in self.order if self.items[id][1]) if asked.input is None else asked.input
        if self.instructions:
            turns = (("system", self.instructions), *turns)
        self.responses[id] = FollowedResponse(
            id,
            event_id,
            asked,
            turns,
            {id: content for id, (_, content) in self.items.items()},
            self._max_model_len,
            self._faults,
            self._lives[event_id],
            is_truncated=self.truncation == "auto",
        )
        assert len(self.responses) <= MAX_OUT_OF_BAND + 1, f"{len(self.responses)} responses are active"

    def _finish_item(self, item: dict[str, Any]) -> None:
        role, content = self.items[item["id"]]
        if role == "assistant":
            self.items[item["id"]] = role, _text_in(item)
            return
        shown = len(item["content"]) - 1, _text_in(item)
        assert shown == (len(pictures_of(content)), text_of(content)), f"{content} is shown as {item}"

    def _active(self, id: str) -> FollowedResponse:
        assert id in self.responses, f"{id} is not active"
        return self.responses[id]

    def _end(self, response: dict[str, Any]) -> None:
        self._active(response["id"]).end(response)
        del self.responses[response["id"]]


def _user_item(content: Content) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": item_content(content)}


def _text_in(item: dict[str, Any]) -> str:
    return "".join(part.get("text", "") for part in item["content"])
