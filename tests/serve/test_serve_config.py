"""ServeConfig: invalid fields are refused by name."""

import dataclasses

import numpy as np
import pytest

from trioengine.core.config import EngineConfig
from trioengine.core.errors import InvalidConfig
from trioengine.serve.config import ConnectionLimits, ServeConfig

BAD = [
    ("host", "", "host must be a name or an address, got ''"),
    ("host", None, "host must be a name or an address, got None"),
    ("port", -1, "port must be an integer from 0 to 65535, got -1"),
    ("port", 65536, "port must be an integer"),
    ("served_model_name", "", "served_model_name must be a name, got ''"),
    ("served_model_name", 5, "served_model_name must be a name, got 5"),
    ("shutdown_timeout", -0.5, "shutdown_timeout must be a number from 0"),
    ("max_connections", 0, "max_connections must be an integer from 1"),
    ("unknown_fields", "ignore", "unknown_fields must be warn or refuse, got 'ignore'"),
    ("tool_call_parser", "xml", "tool_call_parser must be one of auto, hermes, llama3, json, got 'xml'"),
    ("reasoning_parser", "auto", "reasoning_parser must be one of none, deepseek_r1, qwen3, got 'auto'"),
    ("insecure", 1, "insecure must be True or False, got 1"),
    ("api_key", "", "api_key must be keys"),
    ("api_key", ("a", "secret key"), "api_key must be keys"),
    ("api_key", ("sécret",), "api_key must be keys"),
    ("admin_key", (b"secret",), "admin_key must be keys"),
    ("admin_key", None, "admin_key must be keys"),
    ("allowed_origin", "*", r"allowed_origin must be origins such as https://example.com, got '\*'"),
    ("allowed_origin", ("https://example.com/",), "allowed_origin must be origins"),
    ("allowed_origin", ("https://",), "allowed_origin must be origins"),
    ("allowed_origin", ("https://EXAMPLE.com",), "allowed_origin must be origins"),
    ("allowed_origin", (5,), "allowed_origin must be origins"),
    ("allowed_host", "example.com:80", "allowed_host must be names or addresses without a port, got 'example.com:80'"),
    ("allowed_host", (5,), "allowed_host must be names"),
    ("allowed_host", "a:80", "allowed_host must be names or addresses without a port, got 'a:80'"),
    ("allowed_host", "[::1]:80", "allowed_host must be names"),
    ("allowed_host", "[example.com]", "allowed_host must be names"),
    ("allowed_host", "fe80::1%eth0", "allowed_host must be names"),
    ("allowed_host", "", "allowed_host must be names"),
    ("root_path", "llm", "root_path must be a path such as /llm, without a slash at its end, got 'llm'"),
    ("root_path", "/llm/", "root_path must be a path"),
    ("ssl_certfile", "", "ssl_certfile must be a file, got ''"),
    ("ssl_keyfile", 5, "ssl_keyfile must be a file, got 5"),
    ("ssl_certfile", "a\0b", r"ssl_certfile must be a file, and its name has a NUL: 'a\\x00b'"),
    ("ssl_keyfile", "a\0b", "ssl_keyfile must be a file, and its name has a NUL"),
    ("ssl_keyfile", "\ud800", "ssl_keyfile must be a file, and its name is not valid Unicode"),
    ("weights_dir", "a\0b", "weights_dir must be a directory, and its name has a NUL"),
    ("weights_dir", "", "weights_dir must be a directory, got ''"),
    ("weights_dir", 5, "weights_dir must be a directory, got 5"),
    ("max_sessions_per_key", 0, "max_sessions_per_key must be an integer from 1"),
    ("max_body_size", -1, "max_body_size must be an integer from 0"),
    ("max_header_size", 100, "max_header_size must be an integer from 1024 to 65536, got 100"),
    ("max_message_size", 0, "max_message_size must be an integer from 1"),
    ("max_conversation_size", 0, "max_conversation_size must be an integer from 1"),
    ("max_buffered_bytes", 0, "max_buffered_bytes must be an integer from 1"),
    ("max_buffered_bytes_per_key", 1.5, "max_buffered_bytes_per_key must be an integer from 1"),
    ("handshake_timeout", 0, "handshake_timeout must be a number above 0"),
    ("body_timeout", "1", "body_timeout must be a number above 0"),
    ("idle_timeout", float("inf"), "idle_timeout must be a number above 0"),
    ("client_ping_interval", -1, "client_ping_interval must be a number above 0"),
    ("send_timeout", 0, "send_timeout must be a number above 0"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_what_cannot_be_is_refused_by_name(field, value, message):
    with pytest.raises(InvalidConfig, match=f"^{message}") as refused:
        ServeConfig(**{field: value})
    assert refused.value.fields == (field,)


@pytest.mark.parametrize("field", ["api_key", "admin_key"])
def test_a_key_that_would_not_be_asked_for_is_refused(field):
    message = f"^insecure serves all clients without a key, and {field} is set: give one of them$"
    with pytest.raises(InvalidConfig, match=message) as refused:
        ServeConfig(insecure=True, **{field: "a"})
    assert refused.value.fields == ("insecure", field)


def test_numbers_are_stored_as_pythons():
    assert type(ServeConfig(port=np.int64(80)).port) is int
    assert ServeConfig(served_model_name="toy").served_model_name == "toy"


def test_every_field_was_tried():
    assert {field for field, _, _ in BAD} == {field.name for field in dataclasses.fields(ServeConfig)}


def test_keys_are_never_shown():
    config = ServeConfig(api_key=["secret-1", "secret-2"], admin_key="secret-3")
    assert config.api_key == ("secret-1", "secret-2")
    assert config.admin_key == ("secret-3",)
    assert "secret" not in repr(config)
    with pytest.raises(InvalidConfig) as refused:
        ServeConfig(api_key="sec ret")
    assert "sec ret" not in str(refused.value)


def test_whether_clients_need_a_key():
    assert not ServeConfig().has_keys
    assert ServeConfig(api_key="a").has_keys
    assert ServeConfig(admin_key="a").has_keys


def test_a_configuration_is_the_limits_of_its_connections():
    limits = ServeConfig(max_body_size=5, send_timeout=7)
    assert isinstance(limits, ConnectionLimits)
    assert (limits.max_body_size, limits.send_timeout, limits.handshake_timeout) == (5, 7.0, 10.0)


def test_no_field_has_the_name_of_one_of_the_engines():
    """They are options of one command."""
    engine = {field.name for field in dataclasses.fields(EngineConfig)}
    assert not engine & {field.name for field in dataclasses.fields(ServeConfig)}


def test_larger_bodies_and_messages_for_images():
    limits, mib = ServeConfig(), 1 << 20
    assert [limits.largest_body(takes_images=takes) for takes in (False, True)] == [4 * mib, 32 * mib]
    assert [limits.largest_message(takes_images=takes) for takes in (False, True)] == [mib, 32 * mib]


@pytest.mark.parametrize("takes_images", [False, True])
def test_limits_that_are_given(takes_images):
    limits = ServeConfig(max_body_size=5, max_message_size=7)
    assert limits.largest_body(takes_images=takes_images) == 5
    assert limits.largest_message(takes_images=takes_images) == 7
