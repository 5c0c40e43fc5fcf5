"""The counts of the offline benchmark."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from trioengine import EngineConfig, Grammar, InvalidConfig
from trioengine.cli.bench import offline
from trioengine.cli.bench.offline import STRUCTURE, OfflineRun, check_work, run
from trioengine.testing import simulated_engine
from trioengine.testing.simulation import DEFAULT_LIMITS


async def test_every_token_that_came_is_counted(autojump_clock):
    """Also with the context full to its last token, 512."""
    async with simulated_engine() as (engine, _):
        check_work(engine, 3, 500, 12)
        figures = await run(engine, 3, 500, 12)
        assert figures.output_tps * figures.seconds == pytest.approx(3 * 12)
        cut = await run(engine, 3, 500, 100)
        assert cut.output_tps * cut.seconds == pytest.approx(3 * 12)


async def test_work_that_the_context_would_cut_is_refused(autojump_clock):
    async with simulated_engine() as (engine, _):
        with pytest.raises(InvalidConfig, match="--prompt-len 500 and --output-len 13: the context has 512 tokens"):
            check_work(engine, 3, 500, 13)


async def test_a_percentile_is_no_less_than_the_median(autojump_clock):
    """Also with two requests: here one waits for the other's slot."""
    async with simulated_engine(limits=replace(DEFAULT_LIMITS, max_num_seqs=1)) as (engine, _):
        figures = await run(engine, 2, 4, 4)
        assert figures.ttft_p99 > figures.ttft_median > 0


def test_the_table_says_its_units(monkeypatch, capsys):
    limits = SimpleNamespace(dtype="float32", quantization="gguf", kv_cache_dtype="int8")

    async def bench(*arguments):
        return [OfflineRun(2.0, 6.0, 0.1, 0.2, 0.3, 0.4)], limits

    monkeypatch.setattr(offline, "_bench", bench)
    offline.bench_offline(EngineConfig(), 3, 5, 4, repeat=1, as_json=False)
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["kv_cache_dtype"] == "int8"
    assert (rows["seconds"], rows["output_tps"], rows["ttft_p99"]) == ("2.0 s", "6.0 tokens/s", "0.2 s")
    assert (rows["tpot_median"], rows["prompt_len"], rows["requests"]) == ("0.3 s a token", "5 tokens", "3")


async def test_structured_answers_do_not_end_early(autojump_clock):
    async with simulated_engine() as (engine, _):
        figures = await run(engine, 3, 8, 300, grammar=Grammar.json_schema(STRUCTURE))
        assert figures.output_tps * figures.seconds == pytest.approx(3 * 300)
