"""The tiny checkpoints of `tiny_llama` as GGUF files."""

import gguf
import numpy as np

IQ4_NL_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])  # ggml-common.h


def permuted(weight, heads):
    """llama.cpp's layout of query and key rows: rotary pairs side by side."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name):
    for theirs, ours in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(theirs, ours)
    return name


def iq4_nl(array):
    """Blocks of 32 numbers, each the nearest value of ggml's table times the block's scale; gguf only reads them."""
    groups = array.reshape(-1, 32)
    scales = (np.abs(groups).max(axis=1, keepdims=True) / 127).astype(np.float16)
    scaled = groups / scales.astype(np.float32)
    codes = np.abs(scaled[..., None] - IQ4_NL_VALUES).argmin(axis=-1).astype(np.uint8)
    blocks = np.concatenate((scales.view(np.uint8), codes[:, :16] | codes[:, 16:] << 4), axis=1)
    return blocks.reshape(*array.shape[:-1], array.shape[-1] // 32 * 18)


def stored_as(array, kind):
    return iq4_nl(array) if kind.name == "IQ4_NL" else gguf.quants.quantize(array, kind)


def new_writer(path, architecture, config):
    """A GGUF file with the metadata that every architecture has."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    return writer


def write_gguf(
    tiny_llama, path, variant, architecture=None, kinds=None, extra=None, metadata=None, values=None, **changes
):
    """The variant as a GGUF file; `kinds` gives the stored type of some tensors, `values` maps all numbers."""
    config = {**tiny_llama.BASE, **tiny_llama.VARIANTS[variant], **changes}
    writer = new_writer(path, architecture or config["model_type"], config)
    for key, value in (metadata or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    if variant == "linear" and metadata is None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {name: tensor.numpy() for name, tensor in tiny_llama.tensors(config).items()}
    for name, array in {**tensors, **(extra or {})}.items():
        for projection, count in heads.items():
            array = permuted(array, count) if projection in name and config["model_type"] == "llama" else array
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        array = np.ascontiguousarray(array)
        stored = stored_as(array if values is None else values(name, array), kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
