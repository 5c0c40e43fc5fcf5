"""A Realtime client that knows what it must be told: it follows its conversation event by event."""

from __future__ import annotations

import itertools
import json
from typing import Any

from trioengine.core.messages import FinishReason
from trioengine.serve.realtime.connection import GOING_AWAY
from trioengine.testing.fuzz.oracles import Troubles, Turn, prompt_ids, reference
from trioengine.testing.simulated_client import SimulatedClient
from trioengine.testing.simulated_peer import Mood

PATH = "/v1/realtime"


class RealtimeClient(SimulatedClient):
    """Assertions are raised from where its bytes arrive."""

    def __init__(self, max_model_len: int, troubles: Troubles) -> None:
        super().__init__(PATH, self._told)
        self.items: dict[str, Turn] = {}
        self.order: list[str] = []
        self.instructions = ""
        self.num_events = 0
        self.num_done = 0  # responses
        self.response: str | None = None  # the active one
        self._max_model_len = max_model_len
        self._troubles = troubles
        self._ids = itertools.count(1)
        self._owed: dict[str, str] = {}  # what it sent and was not answered yet: event id -> type
        self._limits: dict[str, int] = {}  # of the tokens of each response it asked for
        self._cancelled: set[str] = set()  # of these, those that it may have cancelled
        self._may_be_cancelled = False  # the active one
        self._prompt: tuple[int, ...] = ()
        self._limit = 0
        self._delta = ""
        self._failure: str | None = None

    # ---- what it asks ---------------------------------------------------------------------------------------------

    def ask(self, name: str, **fields: Any) -> str:
        """Send an event that is answered; returns its id."""
        id = f"e{next(self._ids)}"
        self._owed[id] = name
        self.send(json.dumps({"type": name, "event_id": id, **fields}))
        return id

    def say(self, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        self.ask("conversation.item.create", item={"type": "message", "role": "user", "content": content})

    def respond(self, max_tokens: int) -> None:
        self._limits[self.ask("response.create", response={"max_output_tokens": max_tokens})] = max_tokens

    def cancel(self) -> None:
        """It is answered by an error only, where there is nothing to cancel."""
        self._cancelled |= set(self._limits)
        self._may_be_cancelled = True
        self.send(json.dumps({"type": "response.cancel"}))

    @property
    def is_active(self) -> bool:
        return self.response is not None

    # ---- what it is told ------------------------------------------------------------------------------------------

    def check_at_rest(self) -> None:
        """Everything is answered; a response may be in progress."""
        if self.mood is Mood.WELL and self.accepted and self.can_send:
            assert not self._owed, f"never answered: {self._owed}"

    def on_goodbye(self, code: int) -> None:
        assert code != GOING_AWAY or self.response is None, f"a goodbye in the middle of {self.response}"

    def _told(self, event: dict[str, Any]) -> None:
        assert event["sequence_number"] == self.num_events, f"event {self.num_events} is {event}"
        self.num_events += 1
        match event["type"]:
            case "session.updated":
                self._answered("session.update")
                self.instructions = event["session"]["instructions"]
            case "conversation.item.added":
                item = event["item"]
                self._insert(item, event["previous_item_id"])
                if item["role"] == "user":
                    self._answered("conversation.item.create")
            case "conversation.item.done":
                self.items[event["item"]["id"]] = _turn(event["item"])
            case "conversation.item.deleted":
                self._answered("conversation.item.delete")
                self.order.remove(event["item_id"])
                del self.items[event["item_id"]]
            case "response.created":
                self._begin(event["response"])
            case "response.output_text.delta":
                assert event["response_id"] == self.response, f"a delta of no active response: {event}"
                self._delta += event["delta"]
            case "response.output_text.done":
                assert event["text"] == self._delta, f"the deltas give {self._delta!r}, and then {event}"
            case "response.done":
                self._end(event["response"])
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
        if id in self._owed:
            del self._owed[id]
        elif self.response is not None and id is not None:
            self._failure = error["code"]

    def _insert(self, item: dict[str, Any], previous: str | None) -> None:
        assert item["id"] not in self.items, f"item {item['id']} is added twice"
        self.items[item["id"]] = _turn(item)
        self.order.insert(0 if previous is None else self.order.index(previous) + 1, item["id"])

    def _begin(self, response: dict[str, Any]) -> None:
        assert self.response is None, f"{response['id']} begins while {self.response} is active"
        asked = self._answered("response.create")
        self._limit, self._may_be_cancelled = self._limits.pop(asked), asked in self._cancelled
        self.response, self._delta, self._failure = response["id"], "", None
        turns = [self.items[id] for id in self.order if self.items[id][1]]
        self._prompt = prompt_ids((*([("system", self.instructions)] if self.instructions else []), *turns))

    def _end(self, response: dict[str, Any]) -> None:
        assert response["id"] == self.response, f"{response['id']} is done, {self.response} is active"
        self.response = None
        self.num_done += 1
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        assert text == self._delta, f"the deltas give {self._delta!r}, the response is {text!r}"
        room = self._max_model_len - len(self._prompt)
        expected = reference(self._prompt, min(room, self._limit), ()) if room > 0 else None
        if response["status"] != "failed":
            tokens = {name: response["usage"][f"{name}_tokens"] for name in ("total", "input", "output")}
            assert tokens["total"] == tokens["input"] + tokens["output"], f"the usage is {tokens}"
        match response["status"]:
            case "failed":
                code = response["status_details"]["error"]["code"]
                assert self._failure == code, f"it failed by {code}, the error before it was {self._failure}"
                assert expected is None or self._troubles.excuse(code), f"nothing may fail by {code}"
            case "cancelled":
                assert self._may_be_cancelled, "nobody has cancelled it"
            case "completed" | "incomplete" as status:
                finish_reason = FinishReason.STOP if status == "completed" else FinishReason.LENGTH
                assert expected is not None, "there was no room for an answer"
                assert (text, finish_reason) == (expected.text, expected.finish_reason), (
                    f"the response is {text!r} and {status}, the model's is {expected.text!r}, {expected.finish_reason}"
                )
        assert expected is None or expected.text.startswith(text), (
            f"{text!r} is no part of the model's answer {expected.text!r}"
        )


def _turn(item: dict[str, Any]) -> Turn:
    return item["role"], "".join(part["text"] for part in item["content"])
