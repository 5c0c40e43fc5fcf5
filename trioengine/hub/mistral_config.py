"""The shape of a Mistral model: a Llama, maybe with a sliding window (arXiv 2310.06825). GGUF files call it a Llama."""

from __future__ import annotations

from trioengine.hub.llama_config import LlamaConfig, count_layers
from trioengine.hub.model_config import Fields

MODEL_TYPES = ("mistral",)
_WINDOW = 4096  # transformers' default; null means none


def config_from_hf(fields: Fields, num_tensors: int) -> LlamaConfig:
    """Read config.json. Raises ModelError, naming the field."""
    fields.count("num_key_value_heads")  # transformers' default is 8, and not the number of heads
    is_full = fields.has("sliding_window") and fields.get("sliding_window") is None
    window = None if is_full else fields.count("sliding_window", _WINDOW)
    windows = (window,) * count_layers(fields, "num_hidden_layers", num_tensors)
    biases = {"attention_bias": False, "output_bias": False, "mlp_bias": False}
    return LlamaConfig.from_hf(fields, num_tensors, windows=windows, **biases)
