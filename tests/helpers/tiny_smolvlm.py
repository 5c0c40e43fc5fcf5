"""Tiny SmolVLM checkpoints with random weights, in the files of the published ones: the same wherever written."""

from pathlib import Path

import numpy as np
import torch

from helpers.random_checkpoint import RandomTensors, write_checkpoint
from helpers.tiny_llama import add_llama

TEXT = {
    "architectures": ["VLlama3ForCausalLM"],
    "head_dim": 8,
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 1024,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "vocab_size": 320,
}
VISION = {
    "hidden_size": 32,
    "image_size": 32,
    "intermediate_size": 56,
    "max_image_size": {"longest_edge": 32},
    "model_type": "idefics3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "size": {"longest_edge": 96},
}
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<end_of_utterance>",
    "<fake_token_around_image>",
    "<image>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
]
IMAGE_TOKEN_ID = 256 + SPECIAL.index("<image>")
CONFIG = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": IMAGE_TOKEN_ID,
    "model_type": "idefics3",
    "scale_factor": 2,
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "vision_config": VISION,
    "vocab_size": 320,
}
PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Idefics3ImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 32},
    "processor_class": "Idefics3Processor",
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 96},
}
PROCESSOR = {"image_seq_len": 16, "processor_class": "Idefics3Processor"}
TOKENIZER_CONFIG = {
    "additional_special_tokens": ["<fake_token_around_image>", "<image>", "<end_of_utterance>"],
    "bos_token": "<|im_start|>",
    "eos_token": "<end_of_utterance>",
    "pad_token": "<|im_end|>",
    "processor_class": "Idefics3Processor",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<|endoftext|>",
}
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)

# Changes of each file. With 25 patches an edge the buckets of transformers' positions move some of them by rounding;
# and no patch covers the last pixels, as in SmolVLM-Instruct.
VARIANTS: dict[str, dict[str, dict]] = {
    "split": {},
    "whole": {"preprocessor": {"do_image_splitting": False}},
    "smolvlm": {
        "config": {"model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"]},
        "vision": {"model_type": "smolvlm_vision"},
        "preprocessor": {"size": {"longest_edge": 64}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
    },
    "buckets": {
        "config": {"scale_factor": 5},
        "vision": {"image_size": 51, "patch_size": 2, "num_hidden_layers": 1},
        "preprocessor": {"max_image_size": {"longest_edge": 51}, "size": {"longest_edge": 51}},
        "processor": {"image_seq_len": 25},
    },
}


def tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Every tensor of the model, by its Hugging Face name, in float32."""
    weights = RandomTensors(seed)
    text, vision, scale = config["text_config"], config["vision_config"], config["scale_factor"]
    _add_vision(weights, vision)
    width = vision["hidden_size"] * scale**2
    weights.add("model.connector.modality_projection.proj.weight", text["hidden_size"], width)
    add_llama(weights, text | {"tie_word_embeddings": config["tie_word_embeddings"]}, "model.text_model.")
    return weights.by_name


def _add_vision(weights: RandomTensors, vision: dict) -> None:
    def norm(name: str, size: int) -> None:
        weights.add(name + ".weight", size, mean=1.0)
        weights.add(name + ".bias", size)

    def linear(name: str, rows: int, columns: int) -> None:
        weights.add(name + ".weight", rows, columns)
        weights.add(name + ".bias", rows)

    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    prefix = "model.vision_model."
    weights.add(prefix + "embeddings.patch_embedding.weight", hidden, 3, patch, patch)
    weights.add(prefix + "embeddings.patch_embedding.bias", hidden)
    weights.add(prefix + "embeddings.position_embedding.weight", (vision["image_size"] // patch) ** 2, hidden)
    norm(prefix + "post_layernorm", hidden)
    for layer in range(vision["num_hidden_layers"]):
        name = f"{prefix}encoder.layers.{layer}."
        norm(name + "layer_norm1", hidden)
        norm(name + "layer_norm2", hidden)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{name}self_attn.{projection}", hidden, hidden)
        linear(name + "mlp.fc1", inner, hidden)
        linear(name + "mlp.fc2", hidden, inner)


def tokenizer() -> dict:
    """A tokenizer.json: a token for each byte, and the special ones."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = [*map(chr, printable), *(chr(256 + index) for index in range(len(others)))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": 256 + index, "content": token, **flags} for index, token in enumerate(SPECIAL)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: id for id, token in enumerate(characters + SPECIAL)}, "merges": []},
    }


def files(variant: str) -> dict[str, dict]:
    """The JSON files of a variant."""
    changes = {name: VARIANTS[variant].get(name, {}) for name in ("config", "vision", "preprocessor", "processor")}
    return {
        "config.json": CONFIG | {"vision_config": VISION | changes["vision"]} | changes["config"],
        "preprocessor_config.json": PREPROCESSOR | changes["preprocessor"],
        "processor_config.json": PROCESSOR | changes["processor"],
        "tokenizer_config.json": TOKENIZER_CONFIG,
        "tokenizer.json": tokenizer(),
        "chat_template.json": {"chat_template": TEMPLATE},
        "generation_config.json": {"eos_token_id": 256 + SPECIAL.index("<end_of_utterance>")},
    }


def write(path: Path, variant: str, *, seed: int = 0) -> Path:
    """A Hugging Face directory of the variant; each seed has other weights."""
    contents = files(variant)
    return write_checkpoint(path, contents, tensors(contents["config.json"], seed))


def picture(width: int, height: int) -> bytes:
    """Pixels in RGB, row by row: slopes and a checkerboard."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    checks = 90 * ((x // 5 + y // 3) % 2)
    pixels = np.stack((x * 200 // width + 40, y * 160 // height + checks, (x * y) % 256), axis=-1)
    return pixels.astype(np.uint8).tobytes()


# The images of each conversation, as width and height; one line of text follows them.
CASES = {
    "one": [(45, 30)],
    "tall": [(13, 61)],
    "two": [(45, 30), (20, 25)],
    "none": [],
}
QUESTION = "What is it?"
