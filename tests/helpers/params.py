"""How a Python client asks the toy model."""

from trioengine import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=40)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
