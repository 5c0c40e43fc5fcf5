"""The configuration of an Idefics3 or SmolVLM model: a SigLIP tower, a connector, and a Llama decoder.

Absent fields have the defaults of transformers, which does not write nested fields that have their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from trioengine.core.errors import ModelError
from trioengine.core.image import MAX_EDGE, ImageProcessing
from trioengine.core.wording import brief
from trioengine.hub import llama_config
from trioengine.hub.llama_config import LlamaConfig, count_layers
from trioengine.hub.model_config import Fields, JoinedTensor, Shape, read_json

MODEL_TYPES = ("idefics3", "smolvlm")
TEXT_PREFIX, VISION_PREFIX = "model.text_model.", "model.vision_model."
PATCHES, POSITIONS = "embeddings.patch_embedding", "embeddings.position_embedding"  # behind VISION_PREFIX
CONNECTOR = "model.connector.modality_projection.proj"
IMAGE_TOKEN = "<image>"

_CHANNELS = 3
_MAX_TILES = 32  # along an edge; published models have 4
_FILTERS = 6  # number of Pillow's resampling filters
_LEAST_MEAN, _LEAST_STD = -1e6, 1e-6
_TEXT_DEFAULTS = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The shape of the vision tower; counts are at least 1."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int  # pixels of a tile's edge
    patch_size: int
    layer_norm_eps: float

    @property
    def patches_per_edge(self) -> int:
        """Patches along the edge of a tile; pixels beyond the last whole patch are ignored."""
        return self.image_size // self.patch_size

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True)
class Idefics3Config:
    """The shape of the model, and the preprocessing of its images."""

    model_type: str  # idefics3 or smolvlm
    text: LlamaConfig
    vision: VisionConfig
    scale_factor: int  # the edge of the square of patches that becomes one token
    images: ImageProcessing

    def wanted_tensors(self) -> dict[str, Shape]:
        """Return the shape of every tensor that the model needs, by its Hugging Face name."""
        return self.text.wanted_tensors(TEXT_PREFIX) | dict(self._vision_tensors())

    def optional_tensors(self) -> dict[str, Shape]:
        """Return the shapes of tensors that a checkpoint may have."""
        return self.text.optional_tensors()

    def joined_tensors(self) -> Iterator[JoinedTensor]:
        """Yield the tensors that a directory or a GGUF file may have in place of several: none."""
        return self.text.joined_tensors()

    @property
    def ignored_prefixes(self) -> tuple[str, ...]:
        """The beginnings of the names of tensors that are not read: none."""
        return ()

    def _vision_tensors(self) -> Iterator[tuple[str, Shape]]:
        vision = self.vision
        hidden, inner = vision.hidden_size, vision.intermediate_size
        yield f"{VISION_PREFIX}{PATCHES}.weight", (hidden, _CHANNELS, vision.patch_size, vision.patch_size)
        yield f"{VISION_PREFIX}{PATCHES}.bias", (hidden,)
        yield f"{VISION_PREFIX}{POSITIONS}.weight", (vision.patches_per_edge**2, hidden)
        yield from _norm(VISION_PREFIX + "post_layernorm", hidden)
        for index in range(vision.num_layers):
            layer = f"{VISION_PREFIX}encoder.layers.{index}."
            yield from _norm(layer + "layer_norm1", hidden)
            yield from _norm(layer + "layer_norm2", hidden)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from _linear(f"{layer}self_attn.{name}", hidden, hidden)
            yield from _linear(layer + "mlp.fc1", inner, hidden)
            yield from _linear(layer + "mlp.fc2", hidden, inner)
        yield f"{CONNECTOR}.weight", (self.text.hidden_size, hidden * self.scale_factor**2)


def _norm(name: str, size: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _linear(name: str, out_features: int, in_features: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (out_features, in_features)
    yield f"{name}.bias", (out_features,)


# ---- config.json ---------------------------------------------------------------------------------------------------


def config_from_hf(fields: Fields, num_tensors: int) -> Idefics3Config:
    """Read config.json, and beside it preprocessor_config.json and processor_config.json.

    Raises ModelError, naming the file and the field.
    """
    text = _text_config(fields, num_tensors)
    vision = _vision_config(fields.object("vision_config"), num_tensors)
    scale = fields.count("scale_factor", 2)
    if vision.patches_per_edge % scale:
        raise fields.bad("scale_factor", f"must divide the patches of an edge, {vision.patches_per_edge}", 2)
    tokens = (vision.patches_per_edge // scale) ** 2
    images = _image_processing(fields.path.parent, vision.image_size, tokens, _image_token_id(fields, text.vocab_size))
    return Idefics3Config(cast(str, fields.get("model_type")), text, vision, scale, images)


def _text_config(fields: Fields, num_tensors: int) -> LlamaConfig:
    text = fields.object("text_config", _TEXT_DEFAULTS)
    if (model_type := text.get("model_type")) != "llama":
        named = f"text_config.model_type {brief(model_type)}"
        raise ModelError(f"{fields.path}: {named} is not supported; supported: llama")
    config = llama_config.config_from_hf(text, num_tensors)
    return replace(config, tie_word_embeddings=fields.flag("tie_word_embeddings"))


def _vision_config(fields: Fields, num_tensors: int) -> VisionConfig:
    if (activation := fields.get("hidden_act")) not in ("gelu_pytorch_tanh", None):
        named = f"vision_config.hidden_act {brief(activation)}"
        raise ModelError(f"{fields.path}: {named} is not supported; supported: gelu_pytorch_tanh")
    if fields.count("num_channels", _CHANNELS) != _CHANNELS:
        raise fields.bad("num_channels", f"must be {_CHANNELS}")
    hidden, heads = fields.count("hidden_size", 1152), fields.count("num_attention_heads", 16)
    if hidden % heads:
        raise fields.bad("num_attention_heads", f"must divide hidden_size, {hidden}", heads)
    image_size, patch_size = fields.count("image_size", 224), fields.count("patch_size", 32)
    if image_size > MAX_EDGE:
        raise fields.bad("image_size", f"must be at most {MAX_EDGE}", image_size)
    if patch_size > image_size:
        raise fields.bad("patch_size", f"must be at most image_size, {image_size}", patch_size)
    return VisionConfig(
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size", 3072),
        num_layers=count_layers(fields, "num_hidden_layers", num_tensors, 12),
        num_heads=heads,
        image_size=image_size,
        patch_size=patch_size,
        layer_norm_eps=fields.number("layer_norm_eps", 1e-6),
    )


def _image_token_id(fields: Fields, vocab_size: int) -> int:
    token_id = fields.count("image_token_id", 128257)
    if token_id >= vocab_size:
        raise fields.bad("image_token_id", f"must be a token id below {vocab_size}", token_id)
    return token_id


# ---- preprocessor_config.json and processor_config.json ------------------------------------------------------------


def _image_processing(directory: Path, image_size: int, tokens: int, image_token_id: int) -> ImageProcessing:
    """Read the preprocessing; newer models have the preprocessor's fields within processor_config.json."""
    processor = read_json(directory / "processor_config.json")
    if processor.count("image_seq_len", tokens) != tokens:
        raise processor.bad("image_seq_len", f"must be the image tokens of a tile, {tokens}")
    if processor.get("image_processor") is not None:
        fields = processor.object("image_processor")
    else:
        fields = read_json(directory / "preprocessor_config.json", required=True)
    for step in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not fields.flag(step, default=True):
            raise fields.bad(step, "must be true")
    tile = fields.object("max_image_size").count("longest_edge", 364)
    if tile != image_size:
        raise fields.object("max_image_size").bad("longest_edge", f"must be the vision model's, {image_size}", tile)
    return ImageProcessing(
        image_token=IMAGE_TOKEN,
        image_token_id=image_token_id,
        tokens_per_tile=tokens,
        tile_size=tile,
        longest_edge=_longest_edge(fields.object("size"), tile),
        splits=fields.flag("do_image_splitting", default=True),
        mean=_channels(fields, "image_mean", _LEAST_MEAN),
        std=_channels(fields, "image_std", _LEAST_STD),
        rescale_factor=fields.number("rescale_factor", 1 / 255),
        resample=_filter(fields),
    )


def _longest_edge(size: Fields, tile: int) -> int:
    edge = size.count("longest_edge", 4 * 364)
    if min(edge, MAX_EDGE) > _MAX_TILES * tile:
        raise size.bad("longest_edge", f"must be at most {_MAX_TILES} tiles of {tile}", edge)
    return edge


def _channels(fields: Fields, field: str, low: float) -> tuple[float, float, float]:
    red, green, blue = fields.numbers(field, _CHANNELS, 0.5, low)
    return red, green, blue


def _filter(fields: Fields) -> int:
    number = fields.get("resample")
    if number is None:
        return 1
    if type(number) is not int or not 0 <= number < _FILTERS:
        raise fields.bad("resample", f"must be the number of a filter, below {_FILTERS}")
    return number
