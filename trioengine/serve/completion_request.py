"""The request of a completion: prompts as texts or token ids, and the parameters of their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.asked_model import AskedModel, ServedNames
from trioengine.serve.chat_request import HARMLESS, shown_parts, structured_grammar
from trioengine.serve.errors import ClientError
from trioengine.serve.parsing import load_body
from trioengine.serve.reading import check_supported, read, sampling_params, unknown_names
from trioengine.serve.requests import CompletionBody
from trioengine.serve.shown import Shown

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {  # with the values that change nothing
    "best_of": (1,),
    "prompt_logprobs": (),
    "suffix": ("",),
    "use_beam_search": (False,),
}
FIELDS = frozenset({*CompletionBody.__struct_encode_fields__, *HARMLESS, *_UNSUPPORTED})


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request whose body was checked."""

    model: AskedModel
    prompts: Sequence[str | list[int]]
    params: SamplingParams
    n: int  # choices for each prompt
    echo: bool  # the prompt comes before the answer
    stream: bool
    shown: Shown
    request_id: str | None  # the client's own, for /abort_request
    unknown: tuple[str, ...]  # fields that were passed over


def parse_completion_request(body: bytes, names: ServedNames) -> CompletionRequest:
    """Parse the body of a request to the served model. Raises ClientError."""
    fields = load_body(body)
    given = read(fields, CompletionBody)
    asked = names.asked(given.model)
    check_supported(fields, _UNSUPPORTED)
    max_tokens = DEFAULT_MAX_TOKENS if given.max_tokens is None else given.max_tokens
    if not (max_tokens or given.echo):
        raise ClientError("invalid_value", "max_tokens must be at least 1 without echo, got 0", param="max_tokens")
    prompt_logprobs = _prompt_logprobs(given, max_tokens)
    grammar = None if given.structured_outputs is None else structured_grammar(given.structured_outputs)
    return CompletionRequest(
        model=asked,
        prompts=prompts_of(given.prompt, "prompt"),
        params=sampling_params(
            given, max_tokens=max_tokens, logprobs=given.logprobs, prompt_logprobs=prompt_logprobs, grammar=grammar
        ),
        n=given.n or 1,
        echo=bool(given.echo),
        stream=bool(given.stream),
        shown=shown_parts(given, fields),
        request_id=given.request_id,
        unknown=unknown_names(fields, FIELDS),
    )


def _prompt_logprobs(given: CompletionBody, max_tokens: int) -> int | None:
    """Return the engine's parameter: with echo, for shown log-probabilities and for an answer of no tokens.

    Raises ClientError for several choices, each of which would compute such a prompt anew.
    """
    if not given.echo or (max_tokens and given.logprobs is None):
        return None
    if (given.n or 1) > 1:
        reason = "with echo and logprobs" if max_tokens else "with max_tokens 0"
        raise ClientError("invalid_value", f"n must be 1 {reason}, got {given.n}", param="n")
    return given.logprobs or 0


def prompts_of(given: str | list[Any], name: str) -> Sequence[str | list[int]]:
    """Return the prompts in a field: one text or list of token ids, or a list of one kind. Raises ClientError."""
    if isinstance(given, str):
        return (given,)
    kinds = {type(entry) for entry in given}
    if len(kinds) != 1:
        raise ClientError("invalid_type", f"{name} must hold texts, token ids, or lists of token ids", param=name)
    return (given,) if kinds == {int} else given
