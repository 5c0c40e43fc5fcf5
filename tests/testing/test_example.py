"""The example in the test kit's docstring runs as it stands."""

import textwrap

import trioengine.testing
from trioengine import SamplingParams


async def test_the_example(autojump_clock):
    _, code, _ = trioengine.testing.__doc__.split("\n\n")
    names = vars(trioengine.testing) | {"SamplingParams": SamplingParams}
    exec(textwrap.dedent(code), names)
    await names["test_my_program"](autojump_clock)
