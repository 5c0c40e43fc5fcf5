"""A response as its client follows it: what was asked for, what came, and what must have come in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trioengine.core.types import FinishReason
from trioengine.testing.fuzz.answers import Answer, reference
from trioengine.testing.fuzz.image_oracles import check_seen, is_failed
from trioengine.testing.fuzz.pictures import Content, Turn
from trioengine.testing.fuzz.prompts import prompt_of, shortened
from trioengine.testing.fuzz.troubles import Troubles


@dataclass
class Asked:
    """A response.create that was sent."""

    max_tokens: int
    is_beside: bool = False  # it belongs to no conversation
    input: tuple[Turn, ...] | None = None  # in place of the conversation
    may_be_cancelled: bool = False


class FollowedResponse:
    """From response.created to response.done. Raises AssertionError for what must not be."""

    def __init__(
        self,
        id: str,
        event_id: str,
        asked: Asked,
        turns: tuple[Turn, ...],
        contents: Mapping[str, Content],
        max_model_len: int,
        troubles: Troubles,
        *,
        is_truncated: bool,
    ) -> None:
        self.id = id
        self.event_id = event_id
        self.asked = asked
        self.error: dict[str, Any] = {"code": None}  # what an error event said of it
        self._contents = contents  # of the items that it goes on from, by their ids
        self._turns, self._dropped_turns = turns, 0
        if is_truncated:
            self._turns, self._dropped_turns = shortened(turns, max_model_len, asked.max_tokens)
        self._num_dropped = len(turns) - len(self._turns)  # messages
        self._prompt, self._images = prompt_of(self._turns)
        self._room = max_model_len - len(self._prompt)
        self._troubles = troubles
        self._text = ""

    def add(self, delta: str) -> None:
        self._text += delta

    def check_text(self, text: str) -> None:
        assert text == self._text, f"the deltas give {self._text!r}, and then {text!r}"

    def end(self, response: dict[str, Any]) -> None:
        """response.done: the answer is the model's, or what there is of it has its reason."""
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
            f"{text!r} is no part of the model's answer {expected.text!r}"
        )

    def _check_status(self, response: dict[str, Any], text: str, expected: Answer | None) -> None:
        match response["status"]:
            case "failed":
                code = response["status_details"]["error"]["code"]
                assert self.error["code"] == code, f"it failed by {code}, the error before it was {self.error}"
                is_excused = expected is None or self._troubles.excuse(code)
                assert is_excused or self._is_failed_by_an_image(code), f"nothing may fail by {self.error}"
            case "cancelled":
                assert self.asked.may_be_cancelled, "nobody has cancelled it"
            case "completed" | "incomplete" as status:
                finish_reason = FinishReason.STOP if status == "completed" else FinishReason.LENGTH
                assert expected is not None, "there was no room for an answer"
                assert (text, finish_reason) == (expected.text, expected.finish_reason), (
                    f"the response is {text!r} and {status}, the model's is {expected.text!r}, {expected.finish_reason}"
                )

    def _is_failed_by_an_image(self, code: str) -> bool:
        """Whether it has one that it must fail for; the error names the item that has it."""
        if self.asked.input is not None:  # the client has no ids of its items
            return is_failed(code, self._turns, self._troubles.dropped)
        return is_failed(code, [("user", self._contents.get(self.error["param"], ""))], self._troubles.dropped)
