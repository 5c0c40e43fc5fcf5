"""Hostile images, decoded as the worker decodes them, with the cost of each: the child of test_hostile_decoding.py.

Usage: MALLOC_MMAP_THRESHOLD_=1000000 python decode_attacks.py, with tests in PYTHONPATH. It prints a line of JSON
for each run: name, the image's dimensions or its error, seconds of processor time, and bytes of memory. With the
threshold no freed memory is used again, which would not count.
"""

import json
import os
import resource
import struct
import zlib
from pathlib import Path

from helpers import encoded_images as images
from helpers.image_attacks import IMAGES

from trioengine.core.errors import RequestRejected
from trioengine.core.image import ImageProcessing
from trioengine.core.image_header import read_header
from trioengine.worker import image_decoding
from trioengine.worker.image_decoding import read_tiles
from trioengine.worker.scheduling.images import ImageError

MIB = 1 << 20
SIDE = 4096  # of accepted images, in pixels
HALF = (0.5, 0.5, 0.5)
PROCESSING = ImageProcessing("<image>", 7, 4, tile_size=16, longest_edge=32, splits=True, mean=HALF, std=HALF)
RUNS = 3  # of a cheap attack: a core that is shared with other processes is slower at times
SHORT = 0.2  # seconds that an image may take that is slow by intent


def png(width, height, *chunks, depth=8, color=2, interlaced=0):
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    start = b"\x89PNG\r\n\x1a\n" + images.png_chunk(header[:4], header[4:])
    return start + b"".join(chunks)


def pixels(num_bytes):
    return images.png_chunk(b"IDAT", zlib.compress(bytes(num_bytes), 1)) + images.png_chunk(b"IEND", b"")


def progressive(width, height, *scans):
    """A gray JPEG of a first scan and these: each takes no pixels but costs a pass over all."""
    quantization = images.segment(0xDB, bytes([0, *[1] * 64]))
    frame = images.segment(0xC2, struct.pack(">BHHB3B", 8, height, width, 1, 1, 0x11, 0))
    dc = images.segment(0xC4, bytes([0x00, 1, *[0] * 15, 0]))
    ac = images.segment(0xC4, bytes([0x10, 1, 1, *[0] * 14, 0xE0, 0]))
    return b"\xff\xd8" + quantization + frame + dc + ac + scan(0, 0) + b"".join(scans) + b"\xff\xd9"


def scan(first, last, bits=0, data=b""):
    return images.segment(0xDA, bytes([1, 1, 0, first, last, bits])) + data


REFINEMENT = scan(1, 63, 0x10, b"\x3f\xff\0" * 33)  # runs of 32,767 blocks without a change


def overlapping_exif(num_entries, num_bytes):
    """An EXIF directory whose entries are all the same bytes: the whole of it."""
    entries = b"".join(struct.pack("<HHII", 1 + tag, 1, num_bytes, 8) for tag in range(num_entries))
    exif = b"II*\0" + struct.pack("<IH", 8, num_entries) + entries
    exif += bytes(num_bytes + 8 - len(exif))
    return b"".join(images.segment(0xE1, b"Exif\0\0" + exif[at : at + 65_000]) for at in range(0, len(exif), 65_000))


JPEG, PNG = images.encoded("JPEG", 50, 40), images.encoded("PNG", 50, 40)
BEFORE_PIXELS = PNG.index(b"IDAT") - 4
PROFILE = images.png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(MIB), 9))
TEXTS = (images.png_chunk(b"zTXt", b"%d\0\0" % index + zlib.compress(bytes(MIB), 9)) for index in range(100))
LARGE = 8192, 8192
LARGE_WEBP = 4096, 3072


def passes(data):
    """Whether the server's process accepts it, so that the worker gets it."""
    try:
        read_header(data)
    except RequestRejected:
        return False
    return True


CHEAP = {
    **{name: data for name, data in IMAGES.items() if passes(data)},
    "a large PNG without pixels": png(*LARGE),
    "a large JPEG without a scan": images.jpeg(images.frame(*LARGE)),
    "a large progressive JPEG without pixels": progressive(*LARGE)[:-2],
    "a large GIF without pixels": images.gif(*LARGE, images.gif_frame(*LARGE), b"\x08"),
    "a large WebP without pixels": images.webp(images.lossy(*LARGE_WEBP)),
    "a large lossless WebP without pixels": images.webp(images.lossless(*LARGE_WEBP)),
    "a WebP canvas of 4096 x 3072": images.webp(images.canvas(*LARGE_WEBP, 2), images.animation_frame(1, 1)),
    "EXIF that is a hundred times itself": JPEG[:2] + overlapping_exif(100, MIB) + JPEG[20:],
    "100 MiB of text": PNG[:BEFORE_PIXELS] + b"".join(TEXTS) + PNG[BEFORE_PIXELS:],
}
SLOW = {
    "a JPEG of 10,000 scans": progressive(*LARGE, REFINEMENT * 10_000),
    "a PNG of 10,000 color profiles": PNG[:BEFORE_PIXELS] + PROFILE * 10_000 + PNG[BEFORE_PIXELS:],
}


def accepted():
    """Large images of all kinds, made only when they are needed."""
    yield "PNG", lambda: png(SIDE, SIDE, pixels(SIDE * (SIDE * 3 + 1)))
    yield (
        "a PNG of 16 bits with alpha, interlaced",
        lambda: png(SIDE, SIDE, pixels(SIDE * (SIDE * 8 + 2)), depth=16, color=6, interlaced=1),
    )
    yield "a PNG of one row", lambda: png(SIDE, SIDE, pixels(SIDE * 3 + 1))
    yield "GIF", lambda: images.encoded("GIF", SIDE, SIDE, mode="L")
    yield "JPEG", lambda: images.encoded("JPEG", SIDE, SIDE)
    yield "CMYK", lambda: images.encoded("JPEG", SIDE, SIDE, mode="CMYK")
    yield "a progressive JPEG", lambda: images.encoded("JPEG", SIDE, SIDE, progressive=True, subsampling=0)
    yield "progressive CMYK", lambda: images.encoded("JPEG", SIDE, SIDE, mode="CMYK", progressive=True)
    yield "WebP", lambda: images.encoded("WEBP", *LARGE_WEBP, method=0)
    yield "a turned WebP", lambda: images.encoded("WEBP", *LARGE_WEBP, method=0, exif=b"Exif\0\0" + images.exif(6))
    yield "a WebP animation", lambda: images.encoded("WEBP", *LARGE_WEBP, frames=2, method=0)
    yield (
        "a lossless WebP with alpha",
        lambda: images.encoded("WEBP", *LARGE_WEBP, mode="RGBA", lossless=True, method=0),
    )


def answer(data):
    """The image's dimensions, or its error."""
    info = read_header(data)
    try:
        read_tiles(data, info, PROCESSING)
    except ImageError as exc:
        return str(exc)
    return [info.width, info.height]


def measured(data):
    """The answer, seconds of processor time, and bytes of memory at the peak, beyond those before."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    found = answer(data)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return found, usage.ru_utime + usage.ru_stime, (usage.ru_maxrss << 10) - before


def report(name, data):
    """In a fork, because a process has one peak."""
    child = os.fork()
    if child == 0:
        print(json.dumps([name, *measured(data)]), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0, name


if __name__ == "__main__":
    answer(PNG)  # imports what decoding needs
    for name, data in CHEAP.items():
        for _ in range(RUNS):
            report(name, data)
    for name, make in accepted():
        report(f"large: {name}", make())
    image_decoding.DECODE_SECONDS = SHORT
    for name, data in SLOW.items():
        report(name, data)
