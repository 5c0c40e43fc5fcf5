"""A Llama so small that it is written in a moment: as a directory of shards, and as a GGUF file."""

import json
import struct

import numpy as np
from safetensors.numpy import save_file

from trioengine.testing.toy_model import toy_model

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "tie_word_embeddings": False,
    "eos_token_id": 257,
}
LAYER = {  # GGUF's name, Hugging Face's, shape
    "attn_norm": ("input_layernorm", (16,)),
    "attn_q": ("self_attn.q_proj", (16, 16)),
    "attn_k": ("self_attn.k_proj", (8, 16)),
    "attn_v": ("self_attn.v_proj", (8, 16)),
    "attn_output": ("self_attn.o_proj", (16, 16)),
    "ffn_norm": ("post_attention_layernorm", (16,)),
    "ffn_gate": ("mlp.gate_proj", (24, 16)),
    "ffn_up": ("mlp.up_proj", (24, 16)),
    "ffn_down": ("mlp.down_proj", (16, 24)),
}
OUTER = {
    "token_embd": ("model.embed_tokens", (264, 16)),
    "output_norm": ("model.norm", (16,)),
    "output": ("lm_head", (264, 16)),
}
TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def names_and_shapes():
    """GGUF's name, Hugging Face's name and the shape of each tensor."""
    for ours, (theirs, shape) in OUTER.items():
        yield f"{ours}.weight", f"{theirs}.weight", shape
    for layer in range(2):
        for ours, (theirs, shape) in LAYER.items():
            yield f"blk.{layer}.{ours}.weight", f"model.layers.{layer}.{theirs}.weight", shape


def tokenizer_json():
    return toy_model(64).tokenizer._tokenizer.to_str()


def write_directory(path):
    """A model in two shards with an index."""
    path.mkdir()
    tensors = {name: np.full(shape, 0.125, np.float32) for _, name, shape in names_and_shapes()}
    files = {name: f"model-{1 + (number > 9)}.safetensors" for number, name in enumerate(tensors)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, path / file, {"format": "pt"})
    contents = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [257, 258]},
        "tokenizer_config.json": {"chat_template": TEMPLATE, "eos_token": {"content": "<|im_end|>"}},
        "model.safetensors.index.json": {"metadata": {}, "weight_map": files},
        "tokenizer.json": json.loads(tokenizer_json()),
    }
    for name, content in contents.items():
        (path / name).write_text(json.dumps(content))


def metadata():
    vocabulary = json.loads(tokenizer_json())["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get), "ab", "bc"]
    return [
        ("general.architecture", "llama"),
        ("llama.context_length", 64),
        ("llama.embedding_length", 16),
        ("llama.feed_forward_length", 24),
        ("llama.block_count", 2),
        ("llama.attention.head_count", 2),
        ("llama.attention.head_count_kv", 1),
        ("llama.attention.layer_norm_rms_epsilon", 1e-5),
        ("llama.rope.scaling.factor", 2.0),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.merges", ["a b", "b c"]),
        ("tokenizer.ggml.token_type", [1] * 256 + [3] * (len(vocabulary) - 256) + [1, 1]),
        ("tokenizer.ggml.eos_token_id", 257),
        ("tokenizer.chat_template", TEMPLATE),
    ]


def string(text):
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def typed(value):
    """(number of GGUF's type, bytes) of a value; what GGUF has no type for becomes a string."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int() if 0 <= value < 1 << 32:
            return 4, struct.pack("<I", value)
        case int() if -(1 << 63) <= value < 1 << 63:
            return 11, struct.pack("<q", value)
        case float():
            return 12, struct.pack("<d", value)
        case [*entries] if len({typed(entry)[0] for entry in entries}) < 2:
            kind = typed(entries[0])[0] if entries else 4
            return 9, struct.pack("<IQ", kind, len(entries)) + b"".join(typed(entry)[1] for entry in entries)
    return 8, string(value if isinstance(value, str) else str(value)[:1000])


def gguf_bytes(entries, *, tensors=None):
    """A GGUF file of zeros: (its header, how many bytes follow it)."""
    infos, end = b"", 0
    tensors = [(name, shape) for name, _, shape in names_and_shapes()] if tensors is None else tensors
    for name, shape in tensors:
        infos += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, end)
        end += (4 * int(np.prod(shape)) + 31) // 32 * 32
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries))
    for key, value in entries:
        kind, data = typed(value)
        head += string(key) + struct.pack("<I", kind) + data
    return head + infos + bytes(-len(head + infos) % 32), end
