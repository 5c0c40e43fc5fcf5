"""Images through the whole worker but its process: payloads in, and the answers of transformers out."""

from __future__ import annotations

import pytest
from helpers.torch_driver import backend, load, reference

from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.messages import AddMessage, AddSession, ImageInput, PayloadConsumed, Tokens
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.testing.simulated_process import SimulatedDecoder, SimulatedPayload
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.images import PayloadArrived
from trioengine.worker.scheduling.sequence import Limits

REFERENCE = reference("vision_reference.json")


@pytest.fixture(scope="module", params=REFERENCE)
def variant(request):
    return request.param


@pytest.fixture(scope="module", params=["native", "cuda"])
def runner(tiny_smolvlm, tmp_path_factory, variant, request):
    path = tiny_smolvlm.write(tmp_path_factory.mktemp("vision"), variant)
    return load(path, kv_cache_memory=8 << 20, **backend(request.param))


class Worker:
    """Sessions with one request each, all of them at once."""

    def __init__(self, runner, **limits):
        self.runner = runner
        limits = {
            "vocab_size": runner.info.vocab_size,
            "max_model_len": runner.info.max_model_len,
            "kv_blocks_total": runner.info.kv_blocks_total,
            "block_size": runner.info.block_size,
            "tile": runner.info.vision.tile,
            **limits,
        }
        self.decoded = []
        self.decoder = SimulatedDecoder(runner.info.vision.decode, self.decoded.append)
        self.core = EngineCore(runner, Limits(**limits), lambda: 0.0, decoder=self.decoder)
        self.answers, self.consumed, self.sources = {}, [], []

    def add(self, number, case, pictures):
        """`pictures`: {size: bytes}, in the order of the prompt's images."""
        processing, starts = self.runner.processing, self.tile_starts(case["input_ids"])
        images = []
        for size, data in pictures:
            self.sources.append(SimulatedPayload(data))
            tiles = [next(starts) for _ in range(processing.num_tiles(*size))]
            info = ImageInfo(ImageFormat.RGB, *size)
            images.append(ImageInput(len(self.sources), "image", data[:64], info, len(data), token_ids(tiles)))
        params = ResolvedParams(temperature=0.0, seed=0, max_tokens=len(case["output"]), ignore_eos=True)
        self.core.handle(AddSession(number))
        message = AddMessage(number, number, 0, token_ids(case["input_ids"]), params, (), images=tuple(images))
        self.take(self.core.handle(message))
        for image in images:
            self.take(self.core.handle(PayloadArrived(image.payload, self.sources[image.payload - 1])))

    def tile_starts(self, ids):
        processing, position = self.runner.processing, 0
        while processing.image_token_id in ids[position:]:
            position = ids.index(processing.image_token_id, position)
            yield position
            position += processing.tokens_per_tile

    def run(self):
        while self.core.has_work or len(self.decoder):
            if len(self.decoder):
                self.decoder.decode()
                self.take(self.core.handle(self.decoded.pop()))
            self.take(self.core.step())
            self.core.check_integrity()

    def take(self, replies):
        for reply in replies:
            assert isinstance(reply, Tokens | PayloadConsumed), reply
            if isinstance(reply, PayloadConsumed):
                self.consumed.append(reply.payload)
            else:
                for row in reply.rows:
                    self.answers.setdefault(row.request, []).extend(row.token_ids)


@pytest.mark.parametrize(
    "limits",
    [{}, {"chunked_prefill_size": 19}, {"max_tiles_per_step": 16}, {"kv_blocks_total": 26, "encoder_cache_memory": 0}],
    ids=["plain", "chunks", "tiles", "few blocks"],
)
def test_answers_about_images_are_those_of_transformers(tiny_smolvlm, runner, variant, limits):
    """Twice, so that the second time finds images and prefixes."""
    cases = REFERENCE[variant]
    worker = Worker(runner, **limits)
    for number in range(8):
        name = list(cases)[number % 4]
        pictures = [(size, tiny_smolvlm.picture(*size)) for size in tiny_smolvlm.CASES[name]]
        worker.add(number + 1, cases[name], pictures)
    worker.run()
    for number, answer in worker.answers.items():
        assert answer == list(cases.values())[(number - 1) % 4]["output"], number
    assert worker.answers.keys() == set(range(1, 9))
    assert not any(source.is_open for source in worker.sources)
    assert sorted(worker.consumed) == list(range(1, len(worker.sources) + 1))
