"""Damaged and lying copies of three tiny models, and a process that reads them with little memory and time.

Usage: python model_mutants.py FIRST END, or lies. Mutant NUMBER is always the same. A line "NUMBER" announces each one,
and a line "NUMBER: …" a fault: an exception other than ModelError, or a message that is long or unprintable.
"""

import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.printable import printable
from trioengine.hub.model_files import read_model
from trioengine.testing.toy_model import toy_model
from trioengine.worker.runner.model_runner import TorchModelRunner
from trioengine.worker.vision.tiles import read_tiles

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
import tiny_smolvlm

MEMORY = 64_000_000  # bytes that reading a mutant may add
CPU_SECONDS = 30  # that it may take
MESSAGE = 600  # characters of an error, without its paths

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


# ---- the models that are damaged -----------------------------------------------------------------------------------


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


# ---- the damage ----------------------------------------------------------------------------------------------------

NUMBERS = (0, 1, 2, 255, 10**6, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
SIZES = (1, 100, 10**6, 2**31, 10**11, 10**12)  # bytes that a file is lengthened by, as holes


def strange_value(rng):
    kinds = [
        lambda: rng.choice((None, True, False, "", "8", [], {}, [[]], -1, 0, 1.5, -0.0, 1e308, float("nan"))),
        lambda: rng.choice((float("inf"), *NUMBERS, -(2**63), 10**100, 10**4000)),
        lambda: rng.choice(("\x1b[31m\x07", "\u202e", "\0", "../up", "x" * 100_000, "{% if", "{{ 1 }}", "\ud800")),
        lambda: [rng.choice((1, "a", None))] * rng.choice((1, 3, 10_000)),
        lambda: {"content": 3, "rope_type": rng.choice(("linear", "llama3", "yarn", 3))},
        lambda: rng.random() * 100,
    ]
    return rng.choice(kinds)()


def places(value):
    """(container, key) of everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield value, key
        yield from places(entry)


def damage_json(rng, text):
    """Some entries removed, replaced, renamed, there twice, or nested deep."""
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 3))):
        all_places = list(places(value))
        if not all_places:
            break
        container, key = rng.choice(all_places[:60] if rng.random() < 0.5 else all_places)
        match rng.randrange(5):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(("\x1b[2J", "x" * 10_000, "a", ""))] = container.pop(key)
            case _:
                container[key] = strange_value(rng)
    text = json.dumps(value)
    if rng.random() < 0.1:
        text = text.replace("{", '{"a":1,"a":2,', 1)
    if rng.random() < 0.1:
        depth = rng.choice((100, 900, 100_000))
        text = text.replace(rng.choice(("null", "true", "1", "{", '"')), "[" * depth + "]" * depth, 1)
    return text.encode()


def damage_bytes(rng, data, header):
    """Bytes flipped, cut out, there twice, or numbers overwritten; most often in the header."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        end = max(1, min(header, len(data)) if rng.random() < 0.9 else len(data))
        at, length = rng.randrange(end), rng.choice((1, 4, 8, 100))
        match rng.randrange(6):
            case 0 | 1:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) % 2**32)
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = data[at : at + length]
    return bytes(data)


def damage_size(rng, path):
    """The file is cut, or goes on with holes."""
    size = path.stat().st_size
    os.truncate(path, rng.randrange(size + 1) if rng.random() < 0.5 else size + rng.choice(SIZES))


def damage_safetensors(rng, data):
    """The JSON of the header, with its length put right."""
    (length,) = struct.unpack("<Q", data[:8])
    header = damage_json(rng, data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def damage_metadata(rng, entries):
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(entries))
        key, value = entries[at]
        match rng.randrange(6):
            case 0:
                del entries[at]
            case 1:
                entries.append((key, strange_value(rng)))
            case 2:
                entries[at] = (rng.choice(("\x1b[2J", "x" * 70_000, "general.alignment", "split.count")), value)
            case 3 if isinstance(value, list):
                entries[at] = (key, value[: rng.randrange(len(value) + 1)] * rng.choice((1, 2)))
            case _:
                entries[at] = (key, strange_value(rng))
    return entries


def write_gguf_mutant(rng, path):
    is_structured = rng.random() < 0.5
    header, size = gguf_bytes(damage_metadata(rng, metadata()) if is_structured else metadata())
    path.write_bytes(header if is_structured else damage_bytes(rng, header + bytes(size), len(header)))
    if is_structured:
        os.truncate(path, len(header) + size)
    if rng.random() < 0.3:
        damage_size(rng, path)


def write_directory_mutant(rng, model, path):
    shutil.copytree(model, path)
    file = path / rng.choice([*sorted(entry.name for entry in path.iterdir()), *["config.json"] * 3])
    data = file.read_bytes()
    if rng.random() < 0.3:
        header = 8 + struct.unpack("<Q", data[:8])[0] if file.suffix == ".safetensors" else len(data)
        file.write_bytes(damage_bytes(rng, data, header))
    elif file.suffix == ".safetensors":
        file.write_bytes(damage_safetensors(rng, data))
    else:
        file.write_bytes(damage_json(rng, data))
    if rng.random() < 0.2:
        damage_size(rng, file)


def write_mutant(number, models, scratch):
    """The path of a damaged model: a directory, or a GGUF file."""
    rng = random.Random(number)
    if number % 3 == len(models):
        path = scratch / "mutant.gguf"
        write_gguf_mutant(rng, path)
    else:
        path = scratch / "mutant"
        write_directory_mutant(rng, models[number % 3], path)
    return path


# ---- files that lie about a size ---------------------------------------------------------------------------------


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
    "an array that is not needed": lambda to, _: lie_array(to / "a.gguf", "tokenizer.ggml.scores", 6, 10**9, 4),
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


# ---- reading them --------------------------------------------------------------------------------------------------


def read(path):
    """As the engine does, then as its worker does: the fault, or None."""
    for action in (lambda: read_model(path), lambda: load(path)):
        try:
            action()
        except ModelError as exc:
            message = str(exc).replace(str(path), "")
            if len(message) > MESSAGE or message != printable(message):
                return f"a message of {len(message)} characters: {message[:MESSAGE]!a}"
        except BaseException as exc:
            return f"{type(exc).__name__}: {str(exc)[:MESSAGE]!a}"
    return None


def load(path):
    """And let it see an image."""
    config = WorkerConfig(str(path), device="cpu", dtype="float32", kernels="torch", kv_blocks=4, num_threads=1)
    runner = TorchModelRunner.load(config, lambda done, total: None)
    if runner.processing is not None:
        runner.encode(read_tiles(tiny_smolvlm.picture(3, 2), ImageInfo(ImageFormat.RGB, 3, 2), runner.processing)[:2])


def limit_resources():
    """What the next mutant may add to the process's data, and how long it may compute: else it dies of it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(status["VmData"].split()[0]) * 1024 + MEMORY, hard))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU_SECONDS, hard))


def main(mutants):
    """Read the mutants by these numbers or names."""
    with tempfile.TemporaryDirectory() as directory:
        model, vision, whole = Path(directory, "model"), Path(directory, "vision"), Path(directory, "whole.gguf")
        write_directory(model)
        tiny_smolvlm.write(vision, "split")
        header, size = gguf_bytes(metadata())
        whole.write_bytes(header + bytes(size))
        for path in (model, vision, whole):  # also warms everything up
            read_model(path)
            load(path)
        for mutant in mutants:
            scratch = Path(directory, "scratch")
            scratch.mkdir()
            path = (
                LIES[mutant](scratch, model) if mutant in LIES else write_mutant(int(mutant), (model, vision), scratch)
            )
            print(mutant, flush=True)
            limit_resources()
            if (fault := read(path)) is not None:
                print(f"{mutant}: {fault}", flush=True)
            shutil.rmtree(scratch)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(LIES if arguments == ["lies"] else range(*map(int, arguments)))
