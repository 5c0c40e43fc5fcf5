"""The load of `bench serve`: arrivals, early departures, bad flags, and percentiles."""

import random
import statistics

import pytest

from trioengine import InvalidConfig
from trioengine.cli.bench.config import BenchConfig
from trioengine.cli.bench.load import LengthUnit, Moment, Prompts, arrivals, departures, plan
from trioengine.cli.bench.report import percentile

PROMPTS = Prompts([" a", " b"], LengthUnit.WORDS)


def close(value):
    return pytest.approx(value, abs=1e-9)


def test_arrivals():
    assert arrivals(random.Random(0), 3, float("inf"), 1.0) == [0, 0, 0]
    even = arrivals(random.Random(0), 100, 10.0, 1e6)
    assert even == [pytest.approx((index + 1) / 10, abs=0.05) for index in range(100)]
    poisson = arrivals(random.Random(0), 2000, 10.0, 1.0)
    gaps = [after - before for before, after in zip([0.0, *poisson], poisson, strict=False)]
    assert (statistics.fmean(gaps), statistics.pstdev(gaps)) == (close(0.1), pytest.approx(0.1, rel=0.1))


def test_the_same_seed_is_the_same_load():
    config = BenchConfig(num_prompts=20, request_rate=5, leave=50, seed=1)
    assert plan(config, PROMPTS) == plan(config, PROMPTS)
    stays = plan(BenchConfig(num_prompts=20, request_rate=5, seed=1), PROMPTS)
    assert [(job.prompt, job.at) for job in stays] == [(job.prompt, job.at) for job in plan(config, PROMPTS)]


def test_who_leaves():
    chosen = departures(random.Random(0), 40, 25.0, 128)
    leavers = [departure for departure in chosen if departure is not None]
    assert len(leavers) == 10
    assert {departure.moment for departure in leavers} == set(Moment)
    assert all(1 <= departure.texts < 128 for departure in leavers)


def test_percentiles():
    assert [percentile([1.0, 2.0, 4.0], percent) for percent in (0, 25, 50, 75, 100)] == [1, 1.5, 2, 3, 4]


BAD = [
    ({"backend": "x"}, "backend must be openai or realtime"),
    ({"num_prompts": 0}, "num_prompts must be an integer from 1"),
    ({"max_concurrency": 0}, "max_concurrency must be"),
    ({"request_rate": 0}, "request_rate must be a number above 0"),
    ({"idle_sessions": -1}, "idle_sessions must be an integer from 0"),
    ({"leave": 101}, "leave must be a number from 0 to 100"),
    ({"base_url": "ftp://x"}, "base_url must be http"),
    ({"base_url": "http://x:y"}, "base_url must be http"),
    ({"base_url": "http://me:secret@x"}, "base_url must be http"),
    ({"endpoint": "/v1/x"}, "endpoint must be a path that ends in /completions"),
    ({"endpoint": "/v1/completions", "backend": "realtime"}, "endpoint must be a path that ends in /realtime"),
    ({"goodput": ("ttft",)}, "goodput must be"),
    ({"goodput": ("x:1",)}, "goodput must be"),
    ({"goodput": ("ttft:1", "ttft:2")}, "goodput must be"),
    ({"percentile_metrics": "ttft,x"}, "percentile_metrics must be among ttft, tpot, itl, e2el, got 'x'"),
    ({"metric_percentiles": "101"}, "metric_percentiles must be numbers from 0 to 100"),
    ({"api_key": "a\nb"}, "api_key must be one key of visible ASCII"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_bad_flag_is_named(fields, message):
    with pytest.raises(InvalidConfig) as caught:
        BenchConfig(**fields)
    assert str(caught.value).startswith(message)
