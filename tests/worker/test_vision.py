"""Vision models on tiny checkpoints: tiles, embeddings and answers are those of transformers."""

import base64
import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from helpers.torch_driver import backend, load, needs_cuda, reference

from trioengine.core.errors import InvariantError
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.sampling_params import ResolvedParams
from trioengine.hub.model_info import read_model
from trioengine.worker.image_decoding import read_tiles
from trioengine.worker.kernels.batch import EmbeddedRows, make_batch
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence

REFERENCE = reference("vision_reference.json")
GREEDY = ResolvedParams(temperature=0.0, seed=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module", params=REFERENCE)
def variant(request):
    return request.param


@pytest.fixture(scope="module")
def directory(tiny_smolvlm, tmp_path_factory, variant):
    return tiny_smolvlm.write(tmp_path_factory.mktemp("vision"), variant)


@pytest.fixture(scope="module", params=["native", "torch", "cuda"])
def runner(directory, request):
    return load(directory, kv_cache_memory=8 << 20, **backend(request.param))


def tiles_of(runner, tiny_smolvlm, size):
    return read_tiles(tiny_smolvlm.picture(*size), ImageInfo(ImageFormat.RGB, *size), runner.processing)


def expected_features(case):
    values = np.frombuffer(base64.b64decode(case["features"]), "<f4")
    return torch.from_numpy(values.copy())


@dataclasses.dataclass
class Driver:
    """Runs one prompt, with the images' embeddings in place of its image tokens, in chunks of so many tokens."""

    runner: object
    features: torch.Tensor | None  # None: the prompt has no images
    chunk: int

    def answer(self, prompt, num_tokens):
        blocks = list(range(-(-(len(prompt) + num_tokens) // self.runner.info.block_size)))
        sequence = Sequence(0, 0, list(prompt), len(prompt), GREEDY, frozenset(), block_table=blocks)
        while sequence.num_tokens < len(prompt) + num_tokens:
            count = min(self.chunk, sequence.num_tokens - sequence.num_computed_tokens)
            token_id = self.step(sequence, count)
            sequence.num_computed_tokens += count
            if sequence.num_computed_tokens == sequence.num_tokens:
                sequence.token_ids.append(token_id)
        return sequence.token_ids[len(prompt) :]

    def step(self, sequence, count):
        runner, before = self.runner, sequence.num_computed_tokens
        with torch.inference_mode():
            output = SchedulerOutput((ScheduledSequence(sequence, count),))
            batch = make_batch(output, runner.info.block_size).to(runner.model.device)
            batch = dataclasses.replace(
                batch,
                embeddings=self.embedded(batch, sequence.token_ids[:before]),
                sample_rows=torch.tensor([count - 1], device=runner.model.device),
            )
            hidden = runner.model.forward(batch, runner.target.spec.kernels.attention(batch, runner.cache))
            return int(runner.model.logits(hidden)[0].argmax())

    def embedded(self, batch, before):
        image_token = self.runner.processing.image_token_id
        rows = (batch.token_ids == image_token).nonzero().squeeze(1)
        first = before.count(image_token)
        return EmbeddedRows(rows, self.features[first : first + len(rows)]) if len(rows) else None


@pytest.mark.parametrize("name", ["one", "tall", "two"])
def test_tiles_are_those_of_transformers(tiny_smolvlm, directory, variant, name):
    processing = read_model(directory).images
    tiles = torch.cat(
        [
            read_tiles(tiny_smolvlm.picture(*size), ImageInfo(ImageFormat.RGB, *size), processing)
            for size in tiny_smolvlm.CASES[name]
        ]
    )
    assert hashlib.sha256(tiles.numpy().tobytes()).hexdigest() == REFERENCE[variant][name]["tiles"]


@pytest.mark.parametrize("name", ["one", "tall"])
def test_embeddings_are_those_of_transformers(tiny_smolvlm, runner, variant, name):
    (size,) = tiny_smolvlm.CASES[name]
    features = runner.encode(tiles_of(runner, tiny_smolvlm, size))
    assert features.shape == (runner.processing.num_tiles(*size), runner.processing.tokens_per_tile, 48)
    expected = expected_features(REFERENCE[variant][name])
    torch.testing.assert_close(features.flatten().cpu(), expected, atol=1e-5, rtol=1e-5)


def test_a_tile_is_encoded_alone(tiny_smolvlm, runner):
    tiles = tiles_of(runner, tiny_smolvlm, (45, 30))
    together = runner.encode(tiles)
    alone = torch.cat([runner.encode(tile[None]) for tile in tiles])
    if runner.info.device == "cpu":
        assert torch.equal(alone, together)
    else:
        torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [2048, 19])
@pytest.mark.parametrize("name", ["one", "tall", "two", "none"])
def test_greedy_is_that_of_transformers(tiny_smolvlm, runner, variant, name, chunk):
    case = REFERENCE[variant][name]
    encoded = [runner.encode(tiles_of(runner, tiny_smolvlm, size)) for size in tiny_smolvlm.CASES[name]]
    features = torch.cat([features.flatten(0, 1) for features in encoded]) if encoded else None
    output = Driver(runner, features, chunk).answer(case["input_ids"], len(case["output"]))
    assert output == case["output"]


def test_a_prompt_is_that_of_transformers(tiny_smolvlm, directory, variant):
    """The template's text, with each image token expanded."""
    model = read_model(directory)
    for name, sizes in tiny_smolvlm.CASES.items():
        case = REFERENCE[variant][name]
        content = [*({"type": "image"} for _ in sizes), {"type": "text", "text": tiny_smolvlm.QUESTION}]
        text = model.chat_template.render([{"role": "user", "content": content}], add_generation_prompt=True)
        assert text == case["prompt"]
        before, *others = text.split(model.images.image_token)
        images = (model.images.prompt_text(*size) for size in sizes)
        expanded = before + "".join(image + other for image, other in zip(images, others, strict=True))
        assert model.tokenizer.encode(expanded) == case["input_ids"]


def test_bfloat16_runs(tiny_smolvlm, directory, device, variant):
    runner = load(directory, dtype="bfloat16", kv_cache_memory=8 << 20, device=device)
    features = runner.encode(tiles_of(runner, tiny_smolvlm, (45, 30)))
    assert features.dtype == torch.bfloat16
    wanted = expected_features(REFERENCE[variant]["one"])
    assert torch.nn.functional.cosine_similarity(features.flatten().float().cpu(), wanted, dim=0) > 0.999


def test_a_gpu_computes_patches_in_float32(directory):
    """Of the size of SmolVLM-Instruct's, for which cuDNN takes TF32 by default, with errors of 1.5e-3."""
    needs_cuda()
    load(directory, kv_cache_memory=8 << 20, device="cuda")
    random = torch.Generator().manual_seed(0)
    pixels, weight = (torch.randn(shape, generator=random).cuda() for shape in ((4, 3, 364, 364), (1152, 3, 14, 14)))
    found, exact = (
        torch.nn.functional.conv2d(pixels.to(dtype), weight.to(dtype), stride=14)
        for dtype in (torch.float32, torch.float64)
    )
    error = float((found - exact).abs().max() / exact.std())
    assert error < 5e-5


def test_a_model_of_texts_encodes_nothing(tiny_llama, tmp_path):
    runner = load(tiny_llama.write(tmp_path, "plain"), kv_cache_memory=4 << 20)
    assert runner.processing is None
    with pytest.raises(InvariantError, match="an image for a llama model, which sees none"):
        runner.encode(torch.zeros((1, 3, 8, 8), dtype=torch.uint8))
