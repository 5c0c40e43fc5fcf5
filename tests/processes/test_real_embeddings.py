"""Embeddings by the real worker: as transformers computes them, with the same bits in a crowd, from the prefix cache,
after a sleep and after the loss of the worker."""

import os
import signal

import numpy as np
import pytest
import trio
from helpers import tiny_embedder
from helpers.embedder_tokenizer import add_tokenizer
from helpers.expectations import until
from helpers.tiny_embedder import PROMPTS
from helpers.torch_driver import needs_compiler, reference

from trioengine import open_engine

REFERENCE = reference("embedding_reference.json")["qwen3-tied"]
OPTIONS = {"dtype": "float32", "device": "cpu", "kv_cache_memory": 8 << 20, "num_threads": 1, "max_num_seqs": 32}


async def test_embeddings_of_the_real_worker(tmp_path):
    needs_compiler()
    path = add_tokenizer(tiny_embedder.write(tmp_path))
    many = [PROMPTS[0][:number] for number in range(10, 38)] + PROMPTS
    async with open_engine(str(path), batch_invariant=True, chunked_prefill_size=64, **OPTIONS) as engine:
        alone = [(await engine.embed(prompt)).vectors[0] for prompt in PROMPTS]
        for vector, expected in zip(alone, REFERENCE, strict=True):
            assert vector.tolist() == pytest.approx(expected, abs=2e-6)
        (whole,) = (await engine.embed("to be")).vectors
        assert whole == (await engine.embed([*b"to be", tiny_embedder.END_OF_TEXT])).vectors[0]

        crowd = await engine.embed(many)
        assert list(crowd.vectors[-4:]) == alone
        assert engine.statistics().prefix_cache_hits > 0
        await engine.sleep()
        await engine.wake()
        assert (await engine.embed(many)).vectors == crowd.vectors

        found = []
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def embed():
                for _ in range(5):
                    found.append((await engine.embed(many, wait=True)).vectors)

            await until(engine, lambda: engine.statistics().waiting)
            os.kill(engine.statistics().worker_pid, signal.SIGKILL)
        await engine.ready()
        assert found == [crowd.vectors] * 5
        assert engine.statistics().restarts == 1
        short = (await engine.embed(PROMPTS[0], dimensions=7)).vectors[0]
        assert np.linalg.norm(short) == pytest.approx(1.0)
        await engine.check_invariants()
