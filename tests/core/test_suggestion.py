"""The nearest known name."""

import pytest

from trioengine.core.suggestion import did_you_mean

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
