"""A reader that takes what comes in the step in which it comes, instead of being woken."""

import pytest
from helpers.expectations import LONG, everything_is_given_back, reference

from trioengine import SamplingParams


async def test_what_is_taken_wakes_nobody(autojump_clock, simulated):
    """The reader gets what was declined, and the end; nothing is lost, or comes twice."""
    engine, simulation = simulated
    pieces, read = [], []

    def offer(unread):
        if len(pieces) == 3:
            return False
        pieces.append(unread.read_nowait())
        return True

    async with engine.open_session() as session, session.generate([1, 2, 3], LONG) as generation:
        generation.set_sink(offer)
        async for chunk in generation:
            read.append(chunk)
            pieces.append(chunk)
    assert [id for piece in pieces for id in piece.token_ids] == reference(engine, [1, 2, 3], LONG)
    assert "".join(piece.text for piece in pieces) == generation.completion.text
    assert 1 <= len(read) <= 2  # what was declined, and perhaps what came with the end
    await everything_is_given_back(engine, simulation)


async def test_a_text_that_is_taken_alone_is_read(autojump_clock, simulated):
    """Its tokens and log-probabilities come with no chunk any more."""
    engine, _ = simulated
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    async with engine.open_session() as session, session.generate([1, 2, 3], params) as generation:
        first = await anext(generation)
        taken = []
        generation.set_sink(lambda unread: taken.append(unread.read_text_nowait()) or len(taken) < 10)
        rest = [chunk async for chunk in generation]
    completion = generation.completion
    assert "".join([first.text, *taken, *(chunk.text for chunk in rest)]) == completion.text
    num_read = sum(len(chunk.token_ids) for chunk in rest)
    assert 0 < num_read < 19
    assert completion.token_ids[-num_read:] == tuple(id for chunk in rest for id in chunk.token_ids)
    assert completion.logprobs[-num_read:] == tuple(entry for chunk in rest for entry in chunk.logprobs)


async def test_an_offer_comes_when_the_whole_step_is_routed(autojump_clock, simulated):
    """So that what is done with one answer's tokens does not hold up another's."""
    engine, _ = simulated
    seen = []
    async with engine.open_session() as one, engine.open_session() as other:
        async with one.generate([1, 2, 3], LONG) as first, other.generate([4, 5], LONG) as second:

            def offer(unread):
                seen.append((first._state.num_tokens, second._state.num_tokens))
                return False

            first.set_sink(offer)
            second.set_sink(offer)
            await first.wait_settled()
            await second.wait_settled()
    together = [counts for counts in seen if all(0 < count < 199 for count in counts)]
    assert len(together) > 100
    assert all(together.count(counts) == 2 for counts in set(together))


async def test_a_crash_ends_its_session_alone(autojump_clock, simulated, caplog):
    engine, simulation = simulated

    def crash(unread):
        raise ValueError("a bug")

    async with engine.open_session() as session, engine.open_session() as other:
        async with other.generate([4, 5], LONG) as sound:
            with pytest.raises(Exception, match="a bug"):
                async with session.generate([1, 2, 3], LONG) as generation:
                    generation.set_sink(crash)
                    await generation.result()
            assert list((await sound.result()).token_ids) == reference(engine, [4, 5], LONG)
    assert "a bug" in caplog.text
    await everything_is_given_back(engine, simulation)
