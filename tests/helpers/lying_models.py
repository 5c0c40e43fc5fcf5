"""Models with a file that lies about a size: it takes few bytes, and claims to have many."""

import json
import os
import shutil
import struct

from helpers import tiny_smolvlm
from helpers.small_models import CONFIG, gguf_bytes, metadata, string


def replace_entries(**values):
    changes = {key.replace("__", "."): value for key, value in values.items()}
    return [(key, changes.get(key, value)) for key, value in metadata()]


def lie_array(path, key, kind, count, size):
    """A GGUF file, one of whose keys has an array of zeros or empty strings, which is a hole."""
    entries = [(name, value) for name, value in metadata() if name != key]
    header, _ = gguf_bytes(entries, tensors=[])
    count_at = 16  # of the metadata entries, in the header
    header = header[:count_at] + struct.pack("<Q", len(entries) + 1) + header[count_at + 8 :].rstrip(b"\0")
    path.write_bytes(header + string(key) + struct.pack("<IIQ", 9, kind, count))
    os.truncate(path, path.stat().st_size + count * size)
    return path


def lie_block_count(scratch):
    header, size = gguf_bytes(replace_entries(llama__block_count=2**31))
    (scratch / "lie.gguf").write_bytes(header)
    os.truncate(scratch / "lie.gguf", len(header) + size)
    return scratch / "lie.gguf"


def lie_config(scratch, model, **changes):
    shutil.copytree(model, scratch / "lie")
    (scratch / "lie" / "config.json").write_text(json.dumps(CONFIG | changes))
    return scratch / "lie"


def lie_vision(scratch, file, **changes):
    """A vision model; changes of `vision_config` are within it."""
    tiny_smolvlm.write(scratch / "lie", "split")
    fields = json.loads((scratch / "lie" / file).read_text())
    inside = fields.get("vision_config", {}) | changes.pop("vision_config", {})
    (scratch / "lie" / file).write_text(json.dumps(fields | {"vision_config": inside} | changes))
    return scratch / "lie"


def lie_header(scratch, model, header, *, holes=0):
    shutil.copytree(model, scratch / "lie")
    file = scratch / "lie" / "model-1.safetensors"
    file.write_bytes(struct.pack("<Q", len(header) + holes) + header)
    os.truncate(file, 8 + len(header) + holes)
    return scratch / "lie"


def lie_sparse(scratch, model, name):
    shutil.copytree(model, scratch / "lie")
    os.truncate(scratch / "lie" / name, 10**11)
    return scratch / "lie"


def shape_of(shape):
    return json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()


TWICE = f"{{{','.join(f'{json.dumps(str(n))}:0' for n in [*range(200_000), 199_999])}}}".encode()
LIES = {
    "an array of numbers": lambda to, _: lie_array(to / "a.gguf", "tokenizer.ggml.token_type", 0, 10**8, 1),
    "an array of strings": lambda to, _: lie_array(to / "a.gguf", "tokenizer.ggml.tokens", 8, 10**8, 8),
    "an array that is not needed": lambda to, _: lie_array(to / "a.gguf", "general.sizes", 6, 10**9, 4),
    "strings that are not needed": lambda to, _: lie_array(to / "a.gguf", "general.tags", 8, 10**9, 8),
    "more layers than tensors": lambda to, _: lie_block_count(to),
    "as many layers as a count holds": lambda to, model: lie_config(to, model, num_hidden_layers=2**31 - 1),
    "a vocabulary": lambda to, model: lie_config(to, model, vocab_size=2**31 - 1),
    "a context": lambda to, model: lie_config(to, model, max_position_embeddings=2**31 - 1),
    "a tile of a pixel a patch": lambda to, _: lie_vision(to, "config.json", vision_config={"patch_size": 1}),
    "a tile of all the pixels there can be": lambda to, _: lie_vision(
        to, "config.json", vision_config={"image_size": 4096, "patch_size": 512}
    ),
    "as many layers of the tower as a count holds": lambda to, _: lie_vision(
        to, "config.json", vision_config={"num_hidden_layers": 2**31 - 1}
    ),
    "as many tiles as there can be": lambda to, _: lie_vision(
        to, "preprocessor_config.json", size={"longest_edge": 2**31 - 1}
    ),
    "a header of holes": lambda to, model: lie_header(to, model, b"", holes=100_000_000),
    "names there twice": lambda to, model: lie_header(to, model, TWICE),
    "a header of lists": lambda to, model: lie_header(to, model, b"[" + b"[]," * 10**6 + b"0]"),
    "a shape of huge numbers": lambda to, model: lie_header(to, model, shape_of([10**4000] * 900)),
    "a shape of many numbers": lambda to, model: lie_header(to, model, shape_of([2**62] * 100_000)),
    "a config of holes": lambda to, model: lie_sparse(to, model, "config.json"),
    "a tokenizer of holes": lambda to, model: lie_sparse(to, model, "tokenizer.json"),
    "weights of holes": lambda to, model: lie_sparse(to, model, "model-2.safetensors"),
}
