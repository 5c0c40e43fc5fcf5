"""Children of the server get its environment, but no keys."""

from dataclasses import fields

from trioengine.core.config import child_environment
from trioengine.serve.config import ServeConfig


def test_keys_are_left_out():
    ours = {"PATH": "/bin", "TRIOENGINE_HOME": "/x", "TRIOENGINE_API_KEY": "a b", "TRIOENGINE_ADMIN_KEY": "c"}
    assert child_environment(ours) == {"PATH": "/bin", "TRIOENGINE_HOME": "/x"}
    assert "TRIOENGINE_API_KEY" in ours


def test_the_variables_of_others_stay():
    ours = {"OPENAI_API_KEY": "x", "PIP_INDEX_URL": "https://example.com"}
    assert child_environment(ours) == ours


def test_every_option_that_holds_a_key():
    names = {f"TRIOENGINE_{field.name.upper()}": "x" for field in fields(ServeConfig)}
    left = child_environment(names)
    assert not left.keys() & {"TRIOENGINE_API_KEY", "TRIOENGINE_ADMIN_KEY"}
    assert not [name for name in left if name.endswith("_KEY")]
