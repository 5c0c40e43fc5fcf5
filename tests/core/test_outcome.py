"""How a request ended."""

import pytest

from trioengine.core.errors import Outcome
from trioengine.core.types import FinishReason


@pytest.mark.parametrize("finish_reason", FinishReason)
def test_an_answer_that_came_to_its_own_end(finish_reason):
    assert Outcome(finish_reason).is_complete is (finish_reason.value in ("stop", "length"))
