"""Small images for the toy model, and a look at the large pieces of memory that are left of them."""

import base64
import gc
import struct
import tracemalloc
import zlib
from contextlib import contextmanager

LARGE = 1 << 20  # bytes; the toy model's own memory has no piece of this size


def png(width=12, height=9, value=0, padding=0):
    """A grey PNG; with `padding` so many bytes behind its end, which decoders ignore."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compress((b"\0" + bytes([value]) * width) * height)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return image + bytes(padding)


def data_url(data, media_type="image/png"):
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


PICTURE, OTHER = png(value=1), png(value=2)


def image_part(data=PICTURE):
    """As chat completions have it."""
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def content(*images, text="What?"):
    return [*map(image_part, images), {"type": "text", "text": text}]


@contextmanager
def traced():
    """Within, `large_pieces` finds what was allocated, also what only a collection of cycles would free."""
    gc.collect()
    gc.disable()
    tracemalloc.start(8)
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


def large_pieces():
    """The sizes of the large pieces of memory, each with where it was allocated."""
    traces = tracemalloc.take_snapshot().traces
    return [(trace.size, [str(frame) for frame in trace.traceback[-4:]]) for trace in traces if trace.size >= LARGE]
