"""LoRA adapters as PEFT stores them: a directory with adapter_config.json and adapter_model.safetensors.

An adapter changes matrices of a model: `weight + scale * up @ down`, of which `down` has few rows, and `up` as many
columns (arXiv 2106.09685). Reference: https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trioengine.core.errors import ModelError
from trioengine.core.wording import brief
from trioengine.hub.model_config import Fields, ModelConfig, Shape, read_json
from trioengine.hub.safetensors import StoredTensor, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DTYPES = ("F32", "F16", "BF16")
_PREFIX = "base_model.model."
_NAME = re.compile(r"[\w.]+", re.ASCII)
_CHANGES_THE_MODEL = ("pissa", "olora", "corda", "loftq")  # initializations that take a part of its weights
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_UNSUPPORTED = (  # that change more than the matrices, or in another way
    "alora_invocation_tokens",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)


@dataclass(frozen=True, slots=True)
class LowRankChange:
    """The change of one matrix [rows, columns]: `scale * up @ down`."""

    down: StoredTensor  # [rank, columns]
    up: StoredTensor  # [rows, rank]
    scale: float


def adaptable_matrices(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the matrices that adapters may change, by their names: of all layers, but for experts.

    Parts of joined tensors are left out, because an adapter has the rows of its matrix in the stored order. Of a model
    with images, and of an embedding model, there are none.
    """
    if config.images is not None or config.text.embeds:
        return {}
    moved = {part for joined in config.joined_tensors() for part in joined.parts}
    wanted = ((name, shape) for name, shape in config.wanted_tensors().items() if name not in moved)
    shapes = ((name.removesuffix(".weight"), shape) for name, shape in wanted)
    return {name: shape for name, shape in shapes if len(shape) == 2 and ".layers." in name and not _routes(name)}


def _routes(name: str) -> bool:
    """Whether it is an expert's matrix, or the router's that chooses them."""
    return ".experts." in name or ".shared_expert" in name or name.endswith(".mlp.gate")


def read_adapter(directory: Path, matrices: Mapping[str, Shape]) -> dict[str, LowRankChange]:
    """Read an adapter's configuration and the header of its weights: the change of each matrix by its name.

    `matrices` are those that it may change. Raises ModelError, naming the file and the field or the tensor.
    """
    fields, tensors = read_json(directory / CONFIG, required=True), read_header(directory / WEIGHTS)
    _check_supported(fields)
    found: dict[str, LowRankChange] = {}
    for name, down in tensors.items():
        if name.endswith(_DOWN):
            module = name.removeprefix(_PREFIX).removesuffix(_DOWN)
            up = tensors.get(name.removesuffix(_DOWN) + _UP)
            found[module] = _change(fields, module, down, up, matrices.get(module))
    if len(tensors) != 2 * len(found) or not found:
        known = {change.name for each in found.values() for change in (each.down, each.up)}
        unknown = next((name for name in tensors if name not in known), "no tensors")
        raise ModelError(f"{directory / WEIGHTS}: {brief(unknown)} where pairs of lora_A and lora_B were expected")
    return found


def _change(
    fields: Fields, module: str, down: StoredTensor, up: StoredTensor | None, shape: Shape | None
) -> LowRankChange:
    """Check the pair of one matrix, which has this shape; None: the model has no such matrix."""
    if shape is None:
        raise ModelError(f"{down.file}: {brief(module)} is not a matrix of this model that adapters can change")
    if up is None:
        raise ModelError(f"{down.file}: {brief(module)} has lora_A, and no lora_B")
    rank = down.shape[0] if down.shape else 0
    if not 1 <= rank <= max(shape) or down.shape != (rank, shape[1]) or up.shape != (shape[0], rank):
        sizes = f"lora_A {list(down.shape)} and lora_B {list(up.shape)}"
        raise ModelError(f"{down.file}: {brief(module)} has {sizes}, which do not fit a matrix {list(shape)}")
    for tensor in (down, up):
        if tensor.dtype not in DTYPES:
            supported = ", ".join(DTYPES)
            raise ModelError(f"{tensor.file}: {tensor.name} has the type {tensor.dtype}; supported: {supported}")
    return LowRankChange(down, up, _scale(fields, module, rank))


def _scale(fields: Fields, module: str, rank: int) -> float:
    """`lora_alpha`, or its entry of `alpha_pattern`, divided by the rank or by its root."""
    patterns = fields.object("alpha_pattern")
    name = next((name for name in patterns.names() if f".{module}".endswith(f".{name}")), None)
    alpha = fields.number("lora_alpha", 8.0) if name is None else patterns.number(name)
    return alpha / (math.sqrt(rank) if fields.flag("use_rslora") else rank)


def _check_supported(fields: Fields) -> None:
    if fields.get("peft_type") != "LORA":
        raise fields.bad("peft_type", "must be LORA")
    if (bias := fields.get("bias")) not in (None, "none"):
        raise ModelError(f"{fields.path}: bias {brief(bias)} is not supported; supported: none")
    for name in _UNSUPPORTED:
        if fields.get(name):
            raise ModelError(f"{fields.path}: {name} is not supported")
    for name in fields.object("alpha_pattern").names():
        if not _NAME.fullmatch(name):  # PEFT takes regular expressions as well
            raise ModelError(
                f"{fields.path}: alpha_pattern {brief(name)} is not supported; supported: names of modules"
            )
    if str(fields.get("init_lora_weights")).partition("_")[0] in _CHANGES_THE_MODEL:
        raise fields.bad("init_lora_weights", "must leave the model's own weights as they are")
