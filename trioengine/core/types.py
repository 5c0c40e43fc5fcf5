"""Values that all parts of the program share: token ids, and how a request ends.

A type that belongs to one concept lives in the module of that concept (SamplingParams, Image, Tag, …).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

from trioengine.core.wording import brief

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]  # typecode "i": 4 bytes a token
else:
    TokenIds = array  # not subscriptable before Python 3.12

Logprobs: TypeAlias = Mapping[int, float]  # of one position: {token_id: logprob}, the chosen token first
PromptLogprobs: TypeAlias = tuple[Logprobs | None, ...]  # one a token of the prompt; None for the first one
token_ids: Callable[..., TokenIds] = partial(array, "i")  # packs an iterable of token ids; without one, none


class TableEnum(enum.Enum):
    """An enumeration whose members are keys of tables: its hash, unlike that of `Enum`, does not call Python code."""

    __hash__ = object.__hash__


class FinishReason(enum.StrEnum):
    """Why an answer ended. Rows of TOKENS never have ERROR, which REQUEST_FAILED reports, nor TOOL_CALLS."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # it ended by itself, with calls of tools
    ABORT = "abort"
    ERROR = "error"


class Cause(enum.StrEnum):
    """Why a request was aborted, or a session ended."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    TIMEOUT = "timeout"
    SLEEP = "sleep"
    ABORT_ALL = "abort_all"
    SHUTDOWN = "shutdown"
    STALLED = "stalled"
    ERROR = "error"  # of a session: its actor crashed


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a request, and its seconds on the worker."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    queue_time: float = 0.0  # from its arrival at the worker to its first step
    prefill_time: float = 0.0  # from its first step to its first token


class Restricted:
    """Base class of objects that support one Python statement: another one raises TypeError naming the right form.

    `class Session(Restricted, refuses=("await", "with"))` sets the methods of the refused statements. Type checkers do
    not see them, and report such a use themselves.
    """

    __slots__ = ()
    _noun: str  # as in "a session"
    _usage: str  # as in "use `async with …`"

    def __init_subclass__(cls, *, refuses: Iterable[str] = ()) -> None:
        super().__init_subclass__()
        for use in refuses:
            how, methods = _STATEMENTS[use]
            for method in methods:
                setattr(cls, method, _refusal(how))

    def _misused(self, how: str) -> TypeError:
        return TypeError(f"{self._noun} cannot be {how}: {self._usage}")


_STATEMENTS = {  # participle for the error, and the methods that Python looks up
    "await": ("awaited", ("__await__",)),
    "with": ("entered by `with`", ("__enter__", "__exit__")),
    "async with": ("entered by `async with`", ("__aenter__", "__aexit__")),
    "for": ("iterated over by `for`", ("__iter__",)),
    "async for": ("iterated over by `async for`", ("__aiter__",)),
    "next": ("given to `next`", ("__next__",)),
}


def _refusal(how: str) -> Callable[..., NoReturn]:
    def refuse(self: Restricted, *_: object) -> NoReturn:
        raise self._misused(how)

    return refuse


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function by the model. `arguments` is JSON of an object; the output goes back under the `id`."""

    id: str
    name: str
    arguments: str

    def to_json(self) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls` in a chat message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a call: more of its arguments. `index` is the call's place among the answer's calls."""

    index: int
    id: str
    name: str
    arguments: str


class Chunk(NamedTuple):
    """The next part of an answer; `logprobs` holds one `{token_id: logprob}` a token, if requested.

    `prompt_logprobs` holds one for each token of the prompt, if requested, in the first chunk only. `tool_calls` are
    the parts of calls that came, which are not part of the text.
    Chunks from a server reached over the network have no token ids: `()`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion(Restricted, refuses=("for", "async for")):
    """A whole answer. `token_ids` include the end token, `text` does not; `cause` is set for an abort.

    `resumed` counts how often the request went on with another worker after one was lost, `weight_versions` lists the
    versions of the weights it was computed with, in their order; over the network they are 0 and (). `dropped_turns`
    counts the oldest turns that were left out of the prompt. `stop_reason` is the stop string or the token of
    `stop_token_ids` that ended the answer, None for another end; `decode_time` is in seconds, from the first token to
    the last. Over the network they are None and 0. `prompt_logprobs` are also None if the request ended before its
    prompt was computed. `tool_calls` are the whole calls in the answer to a request with tools; `text` leaves them out.
    If the answer ended by itself and has some, `finish_reason` is `tool_calls`.
    """

    _noun = "a completion"
    _usage = "it is a whole answer; `session.generate(...)` gives one in chunks"

    request_id: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None
    finish_reason: FinishReason
    cause: Cause | None
    usage: Usage
    resumed: int = 0
    weight_versions: tuple[int, ...] = ()
    dropped_turns: int = 0
    stop_reason: int | str | None = None
    decode_time: float = 0.0
    prompt_logprobs: PromptLogprobs | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def __repr__(self) -> str:
        ended = str(self.finish_reason) if self.cause is None else f"{self.finish_reason} ({self.cause})"
        tokens = f"{self.usage.prompt_tokens} + {self.usage.completion_tokens} tokens"
        return f"<Completion {self.request_id} {brief(self.text)} {ended}, {tokens}>"
