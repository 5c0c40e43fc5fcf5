"""Loads a model and runs the scheduler's steps on it; lets it sleep, wakes it, and changes its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import InvariantError, ModelError
from trioengine.core.image import ImageInfo, ImageProcessing
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.worker.kernels.adapters import LoadedAdapter
from trioengine.worker.kernels.batch import make_batch
from trioengine.worker.kernels.kv_cache import KVCache
from trioengine.worker.kernels.state_cache import StateCache
from trioengine.worker.models import Model, VisionModel
from trioengine.worker.runner.draft_model import DraftModel
from trioengine.worker.runner.embedding import embed_all
from trioengine.worker.runner.loaded_model import LoadedModel
from trioengine.worker.runner.model_spec import ModelSpec, choose_device
from trioengine.worker.runner.model_weights import failure_of, give_back, share_one_arena
from trioengine.worker.runner.sampling import sample_all
from trioengine.worker.runner.scoring import with_scores
from trioengine.worker.scheduling.images import DecodedImage, Tile, TileShape, Vision
from trioengine.worker.scheduling.prompt_lookup import PromptLookup
from trioengine.worker.scheduling.runner_interface import Drafter, ModelInfo, OnProgress, WantedDraft
from trioengine.worker.scheduling.sequence import Sampled, SchedulerOutput


class TorchModelRunner:
    """A model, and perhaps a draft model; `info` describes them, also while they sleep. For one thread."""

    def __init__(self, target: LoadedModel, draft_model: DraftModel | None = None) -> None:
        self.target = target
        self.draft_model = draft_model
        self._drafter: Drafter = PromptLookup() if draft_model is None else draft_model
        self._adapters: dict[int, LoadedAdapter] = {}  # of the model, by number
        spec = target.spec
        self.info = ModelInfo(
            model_type=spec.model.model_type,
            device=str(spec.device),
            dtype=str(spec.dtype).removeprefix("torch."),
            kernels=spec.kernels.name,
            vocab_size=spec.model.text.vocab_size,
            max_model_len=spec.max_model_len,
            kv_blocks_total=spec.num_blocks,
            block_size=spec.layout.block_size,
            quantization=spec.quantization,
            kv_cache_dtype=str(spec.layout.dtype).removeprefix("torch."),
            vision=vision_of(spec),
            state_slots=spec.num_state_slots,
            windows=spec.windows,
            embeds=spec.model.text.embeds,
        )
        self.processing = spec.model.images  # None: the model takes no images

    @staticmethod
    def load(config: WorkerConfig, on_progress: OnProgress) -> TorchModelRunner:
        """Load the models, except for the parts that are to sleep. Raises ModelError, with the file or the reason.

        `on_progress` is called whenever weights are loaded, also to wake or to change them.
        """
        share_one_arena()
        torch.backends.cudnn.allow_tf32 = False  # of float32, which would leave patches of images 10 bits
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        device = choose_device(config.device)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where Triton starts kernels, and graphs are recorded
        specs = ModelSpec.read_all(config)
        target, *drafting = map(LoadedModel, specs, _shares_of(on_progress, [spec.stored_bytes for spec in specs]))
        runner = TorchModelRunner(target, *map(DraftModel, drafting))
        runner._take(ALL_TAGS.difference(config.asleep))
        return runner

    @property
    def model(self) -> Model:
        """InvariantError while the weights sleep."""
        return self.target.model

    @property
    def cache(self) -> KVCache:
        """InvariantError while it sleeps."""
        return self.target.cache

    @property
    def states(self) -> StateCache | None:
        """The states of sequences; None while they sleep with the KV cache, and for a model without states."""
        return self.target.states

    @property
    def loaded(self) -> list[LoadedModel]:
        """The model, and the draft model, if there is one."""
        return [self.target] if self.draft_model is None else [self.target, self.draft_model.loaded]

    def draft(self, wanted: Sequence[WantedDraft], room: int) -> list[tuple[int, ...]]:
        """Draft by the draft model if there is one, else by prompt lookup."""
        return self._drafter.draft(wanted, room)

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        """Compute a step: one entry for each scheduled sequence with `samples` or `scores`, in their order."""
        target, model = self.target, self.model
        with torch.inference_mode():
            target.copy(output)
            if output.encode:
                encode_tiles(output.encode, self._vision_model)
            batch = make_batch(output, self.info.block_size, target.padding, self._adapters)
            if self.draft_model is not None:
                self.draft_model.follow(output, batch)
            if self.info.embeds:
                return embed_all(target.forward(batch), output.scheduled)
            if batch.score_rows is None:
                logits, best = target.compute(batch)
                return sample_all(logits, output.scheduled, best)
            hidden = target.forward(batch)
            logits = model.logits(hidden[: batch.num_samples])
            sampled = sample_all(logits, output.scheduled, target.spec.kernels.best(logits))
            return with_scores(output, sampled, hidden[batch.num_samples :], model.logits, self.info.vocab_size)

    def prepare(self) -> bool:
        """Record one more CUDA graph, if any is missing."""
        with torch.inference_mode():
            return any(loaded.record_next() for loaded in self.loaded)

    def encode(self, tiles: Tensor) -> Tensor:
        """The embeddings [num_tiles, tokens_per_tile, hidden_size] of uint8 tiles [num_tiles, 3, size, size].

        They are on the model's device, in its dtype. InvariantError while the weights sleep.
        """
        with torch.inference_mode():
            return self._vision_model.encode(tiles)

    @property
    def _vision_model(self) -> VisionModel:
        model = self.model
        if not isinstance(model, VisionModel):
            raise InvariantError(f"an image for a {self.info.model_type} model, which sees none")
        return model

    def load_adapter(self, number: int, path: str) -> None:
        """Load an adapter. Raises ModelError; InvariantError while the weights sleep."""
        self._adapters[number] = self.target.weights.load_adapter(path)

    def drop_adapter(self, number: int) -> None:
        """Drop the adapter of this number."""
        del self._adapters[number]

    def sleep(self) -> None:
        """Give memory back to the system; weights that are in host memory anyway stay where they are."""
        for loaded in self.loaded:
            loaded.release(ALL_TAGS)
        give_back(self.target.spec.device)

    def wake(self, tags: frozenset[Tag]) -> None:
        """Take memory for these tags again: the KV cache is as large as ever, discarded weights are loaded.

        Raises ModelError if it cannot be had: all memory is given back, and all these tags still sleep.
        """
        failure = failure_of(lambda: self._take(tags))
        if failure is not None:
            give_back(self.target.spec.device)
            raise ModelError(failure)

    def update_weights(self, path: str) -> str:
        """Load these weights of the model; where they sleep, check them, drop the old ones, and load them at `wake`.

        The draft model keeps its own. Returns the quantization of the new ones.

        ModelError: they do not fit the model or cannot be read, and the old ones are still there.
        RuntimeError: the old ones had been given up, and could not be loaded again.
        """
        return self.target.update_weights(path)

    def _take(self, tags: frozenset[Tag]) -> None:
        """All of them, for both models, or, with an exception, none: the larger model comes last."""
        with contextlib.ExitStack() as taken:
            for loaded in reversed(self.loaded):
                taken.callback(loaded.take(tags))
            taken.pop_all()


def _shares_of(on_progress: OnProgress, sizes: Sequence[int]) -> Iterator[OnProgress]:
    """Yield for each model a callback that adds the bytes of the others; the last one is loaded first."""
    for index, size in enumerate(sizes):
        yield partial(_report, on_progress, sum(sizes[index + 1 :]), sum(sizes) - size)


def _report(on_progress: OnProgress, before: int, others: int, done: int, total: int) -> None:
    on_progress(before + done, others + total)


def vision_of(spec: ModelSpec) -> Vision | None:
    """Return how the model sees images, or None if it takes none."""
    processing = spec.model.images
    if processing is None:
        return None
    feature_bytes = processing.tokens_per_tile * spec.model.text.hidden_size * spec.dtype.itemsize
    tile = TileShape(processing.tokens_per_tile, 3 * processing.tile_size**2, feature_bytes)
    return Vision(tile, lambda data, info: _decode(data, info, processing))


def _decode(data: memoryview, info: ImageInfo, processing: ImageProcessing) -> DecodedImage:
    from trioengine.worker.image_decoding import read_tiles  # needs Pillow, which a text-only model does not

    tiles = read_tiles(data, info, processing)
    return DecodedImage(tiles, len(tiles))


def encode_tiles(tiles: Sequence[Tile], model: VisionModel) -> None:
    """Give each tile its features [tokens_per_tile, hidden_size]."""
    pixels = torch.stack([cast("Tensor", tile.picture.tiles)[tile.number] for tile in tiles])
    for tile, features in zip(tiles, model.encode(pixels), strict=True):
        tile.picture.features[tile.number] = features.clone()  # no view, which would keep all of them alive
