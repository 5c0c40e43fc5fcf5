"""Logits are in float32, whatever the model's dtype: the sums of the last product, not rounded."""

import pytest
import torch
from helpers import tiny_decoders
from helpers.torch_driver import backend, generate, load, logprobs_after
from test_batch_invariance import check

from trioengine.core.sampling_params import ResolvedParams
from trioengine.hub.model_info import read_model
from trioengine.worker.kernels.batch import make_batch
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence

QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(params=["plain", "tied", "granite"])
def path(request, tiny_llama, tmp_path):
    tiny = tiny_decoders if request.param == "granite" else tiny_llama
    return tiny.write(tmp_path / request.param, request.param, hidden_size=96, vocab_size=208)


def hidden_and_logits(runner, tokens):
    """Of every token."""
    blocks = [*range(-(-len(tokens) // runner.info.block_size))]
    params = ResolvedParams(temperature=0.0, seed=0, max_tokens=0, prompt_logprobs=0)
    sequence = Sequence(0, 0, list(tokens), len(tokens), params, frozenset(), block_table=blocks)
    output = SchedulerOutput((ScheduledSequence(sequence, len(tokens)),))
    batch = make_batch(output, runner.info.block_size).to(runner.model.device)
    with torch.inference_mode():
        hidden = runner.model.forward(batch, runner.target.spec.kernels.attention(batch, runner.cache))
        return hidden, runner.model.logits(hidden)


def divisor(runner):
    """Of Granite's logits."""
    return getattr(runner.target.spec.model.text, "logits_scaling", 1.0)


def are_rounded(logits):
    return torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("kernels", ["native", "cuda"])
def test_they_are_sums_in_float32(path, prompt, kernels):
    """Of the head's weights, then divided by Granite's number, also in float32."""
    runner = load(path, "bfloat16", quantization="none", **backend(kernels))
    hidden, logits = hidden_and_logits(runner, prompt)
    head = "model.embed_tokens" if runner.target.spec.model.text.tie_word_embeddings else "lm_head"
    with runner.target.spec.opened(str(path)) as checkpoint:
        weight = checkpoint.read(f"{head}.weight", torch.bfloat16).double()
    expected = hidden.cpu().double() @ weight.t() / divisor(runner)
    assert hidden.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.cpu().double(), expected, rtol=1e-5, atol=1e-4)
    assert not are_rounded(logits)


def test_products_of_integers(path, prompt):
    _, logits = hidden_and_logits(load(path, "bfloat16", quantization="int8", **backend("native")), prompt)
    assert logits.dtype == torch.float32
    assert not are_rounded(logits)


def test_products_of_torch(path, prompt):
    """On the CPU they are rounded; Granite divides them in float32."""
    runner = load(path, "bfloat16", kernels="torch")
    _, logits = hidden_and_logits(runner, prompt)
    assert logits.dtype == torch.float32
    assert torch.equal((logits * divisor(runner)).bfloat16().float() / divisor(runner), logits)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_same_bits_in_any_batch(path, quantization):
    runner = load(path, "bfloat16", quantization=quantization, **backend("native"))
    prompts = [[(7 * i * i + 3 * i + size) % 200 for i in range(size)] for size in (40, 17, 1, 33)]
    check(runner, prompts, [9, 7, 18, 6], chunks=(13,))


def test_the_best_tokens_are_no_ties(smollm2):
    """In bfloat16 "The" and "L" are equal here, and the answer begins with the wrong one."""
    tokenizer = read_model(smollm2).tokenizer
    question = tokenizer.encode(QUESTION)
    runner = load(smollm2, "bfloat16", quantization="none", **backend("native"))
    first, second = logprobs_after(runner, question).topk(2).values.tolist()
    assert 0.01 < first - second < 0.125  # less than the distance of numbers of bfloat16
    assert "Paris" in tokenizer.decode(generate(runner, [question], 8)[0][0])
