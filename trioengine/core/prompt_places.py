"""The places in a prompt that errors name, by the arguments of the call that it came in: `prompt` and `media`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from trioengine.core.errors import RequestRejected

_PLACE = re.compile(r"prompt\[(\d+)\]\.content(?:\[(\d+)\]((?:\.\w+)*))?")  # in the messages that a prompt became
_WHOLE = re.compile(r"^messages(?=$|: )")  # the templates' name of all of them


@dataclass(frozen=True, slots=True)
class PromptPlaces:
    """A prompt as it was given; its media became the first parts of the last message."""

    is_text: bool  # it became the only message
    last: int  # the index of the last message
    ends_with_text: bool  # the last message's content is a string, which became the one part behind the media
    num_media: int

    @classmethod
    def of(cls, prompt: object, media: object) -> Self:
        """The places of arguments that are not checked yet."""
        if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
            is_text, last, content = False, len(prompt) - 1, prompt[-1]
            content = content.get("content") if isinstance(content, Mapping) else None
        else:
            is_text, last, content = isinstance(prompt, str), 0, prompt
        return cls(is_text, last, isinstance(content, str), len(media) if isinstance(media, Sequence) else 0)

    def name(self, place: str) -> str:
        """A place among the messages, which may be the beginning of an error's message, by the call's arguments."""
        if (found := _PLACE.match(place)) is None:
            return _WHOLE.sub("prompt", place, count=1)
        return self._name(int(found[1]), found) + place[found.end() :]

    def _name(self, index: int, found: re.Match[str]) -> str:
        if index == self.last and found[2] is not None:
            if (part := int(found[2]) - self.num_media) < 0:
                return f"media[{found[2]}]"
            if not self.is_text:
                return f"prompt[{index}].content" + ("" if self.ends_with_text else f"[{part}]{found[3]}")
        return "prompt" if self.is_text else found[0]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Within, RequestRejected has these names."""
        try:
            yield
        except RequestRejected as exc:
            raise self.rejection(exc).with_traceback(exc.__traceback__) from exc.__cause__

    def rejection(self, error: RequestRejected) -> RequestRejected:
        """The error with its places by these names."""
        param = None if error.param is None else self.name(error.param)
        return RequestRejected(error.code, self.name(error.message), param=param)
