"""The nearest known name."""

import pytest

from trioengine.core.bounds import did_you_mean

KNOWN = {"max_tokens", "stop", "seed"}


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("max_token", "", "; did you mean 'max_tokens'?"),
        ("stops", "response.", "; did you mean 'response.stop'?"),
        ("temperature", "", ""),
        ("", "", ""),
        ("max_tokens" * 100_000, "", ""),
    ],
)
def test_the_nearest_name(name, prefix, expected):
    assert did_you_mean(name, KNOWN, prefix) == expected


OPENAI = {"messages", "stream", "min_p", "response_format", "temperature", "top_p", "top_k", "max_tokens", "min_tokens"}
REALTIME = {"input", "instructions", "stop", "max_output_tokens", "min_tokens", "output_modalities"}


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("temp", OPENAI, "temperature"),
        ("top", OPENAI, "top_p"),
        ("te", OPENAI, None),
        ("system", OPENAI, "messages"),
        ("input", OPENAI, "messages"),
        ("reasoning_effort", OPENAI, None),
        ("max_new_tokens", OPENAI, "max_tokens"),
        ("prompt", OPENAI | {"prompt_cache_key"}, "messages"),
        ("stop_sequences", OPENAI, None),
        ("max_tokens", REALTIME, "max_output_tokens"),
        ("maxTokens", REALTIME, "max_output_tokens"),
        ("max_token", REALTIME, "max_output_tokens"),
        ("min_token", REALTIME, "min_tokens"),
        ("system", REALTIME, "instructions"),
        ("stop_sequences", REALTIME, "stop"),
    ],
)
def test_beginnings_and_the_names_of_other_interfaces(name, known, meant):
    assert did_you_mean(name, known) == (f"; did you mean {meant!r}?" if meant else "")
