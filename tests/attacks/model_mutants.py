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

from trioengine.core.config import WorkerConfig
from trioengine.core.errors import ModelError
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.wording import printable
from trioengine.hub.model_info import read_model
from trioengine.worker.image_decoding import read_tiles
from trioengine.worker.runner.model_runner import TorchModelRunner

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import tiny_smolvlm
from helpers.lying_models import LIES
from helpers.small_models import gguf_bytes, metadata, write_directory

MEMORY = 64_000_000  # bytes that reading a mutant may add
CPU_SECONDS = 30  # that it may take
MESSAGE = 600  # characters of an error, without its paths

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
