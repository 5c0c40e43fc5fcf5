"""How an engine is served: what cannot be is refused by name."""

import dataclasses

import numpy as np
import pytest

from trioengine.core.errors import InvalidConfig
from trioengine.core.serve_config import ServeConfig

BAD = [
    ("host", "", "host must be a name or an address, got ''"),
    ("host", None, "host must be a name or an address, got None"),
    ("port", -1, "port must be an integer from 0 to 65535, got -1"),
    ("port", 65536, "port must be an integer"),
    ("served_model_name", "", "served_model_name must be a name, got ''"),
    ("served_model_name", 5, "served_model_name must be a name, got 5"),
    ("shutdown_timeout", -0.5, "shutdown_timeout must be a number from 0"),
    ("max_connections", 0, "max_connections must be an integer from 1"),
    ("insecure", 1, "insecure must be True or False, got 1"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_what_cannot_be_is_refused_by_name(field, value, message):
    with pytest.raises(InvalidConfig, match=f"^{message}"):
        ServeConfig(**{field: value})


def test_numbers_are_stored_as_pythons():
    assert type(ServeConfig(port=np.int64(80)).port) is int
    assert ServeConfig(served_model_name="toy").served_model_name == "toy"


def test_every_field_was_tried():
    assert {field for field, _, _ in BAD} == {field.name for field in dataclasses.fields(ServeConfig)}
