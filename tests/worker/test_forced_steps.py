"""Forced tokens with a vocabulary of words: the answers of 50 schemas are those of the sampler, token by token."""

from dataclasses import replace

import pytest
from helpers.json_schemas import make_schema
from helpers.torch_driver import load, needs_compiler

from trioengine import Grammar, RequestRejected
from trioengine.core.sampling_params import ResolvedParams
from trioengine.hub.model_info import read_model
from trioengine.text.grammar import Compiler
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, Sequence

NUM_SCHEMAS = 50
MAX_TOKENS = 24
PARAMS = (
    ResolvedParams(temperature=0.0, seed=1, max_tokens=MAX_TOKENS),
    ResolvedParams(temperature=1.0, seed=2, max_tokens=MAX_TOKENS, top_p=0.9, top_k=40),
    ResolvedParams(temperature=1.5, seed=3, max_tokens=MAX_TOKENS, logit_bias={100: 50.0}, repetition_penalty=1.3),
)


@pytest.fixture(scope="module")
def model(smollm2):
    return read_model(smollm2)


@pytest.fixture(scope="module")
def runner(tiny_llama, model, tmp_path_factory):
    """Random weights, in float32, whose logits have the same bits however the work is cut."""
    needs_compiler()
    path = tiny_llama.write(tmp_path_factory.mktemp("words"), "plain", vocab_size=model.tokenizer.vocab_size)
    return load(path, batch_invariant=True, max_model_len=128, block_size=4)


@pytest.fixture(scope="module")
def requests(model):
    """Parameters and matchers, by which a new one is made for each run."""
    compiler = Compiler(model.tokenizer, model.eos_token_ids)
    found, seed = [], 0
    while len(found) < NUM_SCHEMAS:
        try:
            grammar = Grammar.json_schema(make_schema(seed))
            compiler.compile(grammar)
            found.append(replace(PARAMS[seed % len(PARAMS)], grammar=grammar))
        except RequestRejected:
            pass
        seed += 1
    return compiler, found


def answers(runner, requests, **changes):
    """The answers and the statistics; `changes` are of the requests' parameters or of the limits."""
    compiler, params = requests
    params = [replace(each, logprobs=changes.get("logprobs")) for each in params]
    scheduler = Scheduler(
        Limits(
            vocab_size=runner.info.vocab_size,
            max_model_len=128,
            kv_blocks_total=changes.get("kv_blocks_total", runner.info.kv_blocks_total),
            block_size=runner.info.block_size,
            chunked_prefill_size=changes.get("chunked_prefill_size", 64),
            max_num_seqs=32,
        )
    )
    sequences = [Sequence(i, i, [100 + i, 7, 5], 3, each, frozenset({2})) for i, each in enumerate(params)]
    for sequence in sequences:
        scheduler.add(sequence)
        scheduler.take_compiled(sequence, compiler.compile(sequence.params.grammar))
    while (output := scheduler.schedule()) is not None:
        scheduler.update(output, runner.execute(output))
    scheduler.check_integrity()
    return [sequence.output for sequence in sequences], scheduler.statistics(0)


def test_the_answers_are_the_samplers(runner, requests):
    expected, every = answers(runner, requests, logprobs=0)
    found, fewer = answers(runner, requests)
    assert found == expected
    assert fewer.generation_tokens == every.generation_tokens
    assert fewer.num_steps < every.num_steps
    assert answers(runner, requests, chunked_prefill_size=5)[0] == expected
    preempted, statistics = answers(runner, requests, kv_blocks_total=20)
    assert statistics.num_preemptions > 0
    assert preempted == expected
