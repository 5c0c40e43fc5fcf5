"""What the benchmark counts."""

import pytest

from trioengine import InvalidConfig
from trioengine.cli.bench.offline import check_work, run
from trioengine.testing import simulated_engine


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
