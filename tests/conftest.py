"""The real model that tests may use."""

import os
from pathlib import Path

import pytest

from trioengine.core.errors import ModelError
from trioengine.hub.pull import resolve


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct's GGUF file, fetched once into the user's cache; without it the test is skipped, or fails
    where CI=true."""
    try:
        return resolve("smollm2-135m-instruct")
    except ModelError as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(exc))
