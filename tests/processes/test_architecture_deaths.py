"""Answers of several architectures go on after the death of the worker, and are the same after sleep.

The environment variable ARCHITECTURES=all takes all variants of tiny_decoders.
"""

import json
import os
import signal

import pytest
import trio
from helpers import tiny_decoders
from helpers.small_models import TEMPLATE, tokenizer_json
from helpers.tiny_llama import PROMPT
from helpers.torch_driver import reference

from trioengine import EngineConfig, SamplingParams, open_engine

PATIENCE = 300  # seconds; a guard against hanging, far beyond what is needed
SOME = ("gemma3", "lfm2", "qwen3-moe", "qwen3-next", "mistral-window")  # windows, states, experts, all of these
REFERENCE = reference("decoders_reference.json")  # of transformers
PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("variant", tiny_decoders.VARIANTS if os.environ.get("ARCHITECTURES") == "all" else SOME)
async def test_an_answer_goes_on_after_a_death_and_is_the_same_after_sleep(tmp_path, variant):
    path = tiny_decoders.write(tmp_path, variant)
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    config = EngineConfig(
        model=str(path),
        device="cpu",
        dtype="float32",
        max_model_len=tiny_decoders.MAX_MODEL_LEN.get(variant),
        kv_cache_memory=16 << 20,
        num_threads=1,
        restart_delays=(0.0,),
    )
    expected = REFERENCE[variant]["output"]
    with trio.fail_after(PATIENCE):
        async with open_engine(config) as engine:
            async with engine.open_session() as session:
                async with session.generate(PROMPT, PARAMS) as stream:
                    await anext(stream)
                    os.kill(engine.statistics().worker_pid, signal.SIGKILL)
                    completion = await stream.result()
            assert list(completion.token_ids) == expected
            await engine.sleep(2, mode="abort")
            await engine.wake()
            completion = await engine.generate(PROMPT, PARAMS)
            assert list(completion.token_ids) == expected
            await engine.check_invariants()
            assert engine.statistics().restarts == 1
