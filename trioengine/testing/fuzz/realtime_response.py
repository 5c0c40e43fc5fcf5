"""The events of a Realtime client that are not answered yet, and the responses that it follows to response.done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trioengine.core.types import FinishReason
from trioengine.testing.fuzz.answers import Answer, reference
from trioengine.testing.fuzz.conversations import Content, Turn, check_seen, is_failed, prompt_of, shortened
from trioengine.testing.fuzz.faults import InjectedFaults, Life
from trioengine.testing.fuzz.realtime_shapes import ResponseEvents
from trioengine.testing.fuzz.tools import TOOL_USES, items_of


@dataclass
class Asked:
    """A response.create that was sent."""

    max_tokens: int
    is_beside: bool = False  # it belongs to no conversation
    input: tuple[Turn, ...] | None = None  # in place of the conversation
    tools: str = ""  # the name of a use of tools
    reference: str | None = None  # to an item, in place of the conversation
    may_be_cancelled: bool = False
    cancelled_by: int | None = None  # the number of the first response.cancel that must have cancelled it, if it began
    is_perhaps_cancelled: bool = False  # by one that may be lost
    metadata: dict[str, str] | None = None


@dataclass
class Owed:
    """An event of the client that is not answered yet; later ones have higher numbers."""

    id: str
    number: int
    name: str
    life: Life
    fields: dict[str, Any]
    asked: Asked | None = None  # of a response.create
    role: str = "user"  # of a new item
    content: Content = ""  # the same
    refused: tuple[str, str] | None = None  # the code and the param of its error, where nothing else is right
    is_mark: bool = False  # its answer shows which events on connections before have arrived
    may_be_lost: bool = False  # with its connection


class FollowedResponse:
    """A response from response.created to response.done. Raises AssertionError for events that are wrong."""

    def __init__(
        self,
        created: dict[str, Any],
        event_id: str,
        asked: Asked,
        turns: tuple[Turn, ...],
        contents: Mapping[str, Content],
        max_model_len: int,
        faults: InjectedFaults,
        life: Life,
        *,
        is_truncated: bool,
        tool_form: str,
    ) -> None:
        self.id = created["id"]
        self.events = ResponseEvents(created, asked.max_tokens, asked.metadata, has_tools=bool(asked.tools))
        self.event_id = event_id
        self.asked = asked
        self.error: dict[str, Any] | None = None  # of an error event about it
        self._contents = contents  # of the items that it goes on from, by their ids
        self._turns, self._dropped_turns = turns, 0
        if is_truncated:
            self._turns, self._dropped_turns = shortened(turns, max_model_len, asked.max_tokens)
        self._num_dropped = len(turns) - len(self._turns)  # messages
        self._use, self._form = TOOL_USES[asked.tools] if asked.tools else None, tool_form
        shown = () if self._use is None else self._use.prompt
        self._prompt, self._images = prompt_of((*shown, *self._turns))
        self._room = max_model_len - len(self._prompt)
        self._faults = faults
        self._life = life

    def end(self, response: dict[str, Any]) -> None:
        """Check response.done: the answer is the model's, or a part of it for a reason."""
        self.events.end(response, self.error)
        length, grammar = min(self._room, self.asked.max_tokens), None
        if self._use is not None:
            grammar = self._use.grammar(self._form)
        expected = None
        if self._room > 0:
            expected = reference(self._prompt, length, (), images=self._images, grammar=grammar)
        outputs = self.events.outputs
        text = "".join(text for _, text in outputs)
        if text:
            check_seen(self._images)
        if response["status"] != "failed":
            whole = len(expected.token_ids) if expected is not None else 0
            at_least = whole if response["status"] != "cancelled" else 0 if self._use is not None else len(text)
            self.events.check_usage(response["usage"], len(self._prompt), at_least, whole)
            dropped = response["dropped_turns"], len(response["dropped_item_ids"])
            assert dropped == (self._dropped_turns, self._num_dropped), f"dropped are {dropped} turns and items"
        self._check_status(response, outputs, expected)
        if expected is not None and outputs:
            answers = [expected.text[:length] for length in range(len(expected.text), -1, -1)]
            is_part = any(outputs == self._items(answer) for answer in answers)
            assert is_part, f"{outputs} is not part of the model's answer {expected.text!r}"

    def _items(self, answer: str) -> list[tuple[str, str]]:
        """The items that an answer is divided into."""
        return [("message", answer)] if self._use is None else items_of(answer, self._form)

    def _check_status(self, response: dict[str, Any], outputs: list[tuple[str, str]], expected: Answer | None) -> None:
        match response["status"]:
            case "failed":
                code = response["status_details"]["error"]["code"]
                is_excused = expected is None or self._faults.excuse(code, self._life)
                assert is_excused or self._is_failed_by_an_image(code), f"nothing may fail by {self.error}"
            case "cancelled":
                assert self.asked.may_be_cancelled, "it was not cancelled"
            case "completed" | "incomplete" as status:
                finish_reason = FinishReason.STOP if status == "completed" else FinishReason.LENGTH
                assert expected is not None, "there was no room for an answer"
                due = self._items(expected.text)
                assert (outputs, finish_reason) == (due, expected.finish_reason), (
                    f"the response is {outputs} and {status}, the model's is {due}, {expected.finish_reason}"
                )

    def _is_failed_by_an_image(self, code: str) -> bool:
        """Whether it has one that it must fail for; the error names the item that has it."""
        if self.asked.input is not None:  # the client has no ids of its items
            return is_failed(code, self._turns, self._faults.dropped)
        return is_failed(code, [("user", self._contents.get((self.error or {})["param"], ""))], self._faults.dropped)
