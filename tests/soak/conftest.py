"""A server for clients that leave, and clients that stay."""

import pytest
from helpers.served import Served


@pytest.fixture
def served(smollm2, tmp_path):
    served = Served(smollm2, tmp_path / "log")
    yield served
    served.process.kill()
    served.process.wait()
