"""Sessions with images on a simulated worker, the pictures they have, and the reference for their answers."""

from contextlib import asynccontextmanager

from helpers.expectations import everything_is_given_back
from trioengine import EngineConfig, SamplingParams
from trioengine.actors.ports import Ports
from trioengine.core.lifecycle import Power
from trioengine.testing import simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import IMAGE_LIMITS
from trioengine.testing.toy_model import ToyPicture, toy_answer

EIGHT = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
PICTURE, OTHER, UNREADABLE = ToyPicture(12, 9, 7), ToyPicture(12, 9, 8), ToyPicture(12, 9, 255)
SIZE = len(PICTURE.data)


@asynccontextmanager
async def engine_for_images(**options):
    """An engine over a simulated worker that takes images. In the end nothing is left of requests and payloads."""
    behaviours = [options.pop("behaviour", Behaviour())]
    threads = {"thread_passes": 2, "thread_threshold": options.pop("thread_threshold", Ports.thread_threshold)}
    config = EngineConfig(model="toy", max_num_seqs=8, max_num_batched_tokens=64, **options)
    async with simulated_engine(config, limits=IMAGE_LIMITS, behaviours=behaviours, **threads) as (engine, simulation):
        yield engine, simulation
        if engine.state is not Power.CLOSED:
            await nothing_is_left(engine, simulation)
    assert not simulation.memfds


def content_of(*images, text="What?"):
    """A user's message with these images before its text."""
    parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return {"role": "user", "content": parts}


def reference(generation, *pictures):
    """What the toy model answers to the prompt of a generation with these pictures."""
    prepared, params = generation._state.prepared, generation.params
    images = [
        ([span.start for span in placed.spans], picture.data)
        for placed, picture in zip(prepared.images, pictures, strict=True)
    ]
    return tuple(toy_answer(prepared.token_ids, params.max_tokens, ignore_eos=True, images=images))


async def ask(session, text, params=EIGHT, **options):
    async with session.generate(text, params, **options) as generation:
        return generation, await generation.result()


async def nothing_is_left(engine, simulation):
    await everything_is_given_back(engine, simulation)
    statistics = engine.statistics()
    assert (statistics.payload_bytes_inflight, statistics.payload_bytes_kept) == (0, 0)
    assert not simulation.memfds
    assert not len(engine.runtime.images.budget.line)
