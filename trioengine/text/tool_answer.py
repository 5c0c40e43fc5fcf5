"""The answer to a request with tools, divided into its text and its calls while it arrives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trioengine.core.tools import GrowingCalls
from trioengine.text.tool_calls import CallArguments, CallBegin, Part, ToolCallParser, ToolForm


class ToolAnswer:
    """Follows the pieces of an output: `texts` are the pieces of the answer's text, `calls` its calls."""

    def __init__(self, form: ToolForm, id_prefix: str) -> None:
        self.texts: list[str] = []
        self.calls = GrowingCalls()
        self._parser = ToolCallParser(form)
        self._id_prefix = id_prefix  # of the calls
        self._num_taken = 0  # pieces of the output

    def take(self, pieces: Sequence[str]) -> None:
        """Take the pieces of the output that came since the last time; these are all of them."""
        new = pieces[self._num_taken :]
        self._num_taken = len(pieces)
        self._add(self._parser.feed("".join(new)))

    def finish(self, *, is_aborted: bool = False) -> None:
        """Take the part that was not decided, as nothing follows; not the beginning of a call that was aborted."""
        self._add(self._parser.finish(is_aborted=is_aborted))

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def _add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case CallBegin(name):
                    self.calls.begin(f"{self._id_prefix}{len(self.calls)}", name)
                case CallArguments(arguments):
                    self.calls.grow(arguments)
                case _:
                    self.texts.append(part)
