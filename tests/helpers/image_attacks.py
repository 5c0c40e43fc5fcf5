"""Hostile images, read as the server's process reads them, with the cost of each: the child of test_hostile_images.py.

Usage: python image_attacks.py, with tests in PYTHONPATH. It prints a line of JSON for each attack:
name, answer, lines of Python that ran, and bytes.
"""

import base64
import json
import sys
import tracemalloc
import zlib

from helpers import encoded_images as images
from helpers.vision_chat import chat_tokenizer
from trioengine.actors.media import source_of_url
from trioengine.core.errors import RequestRejected
from trioengine.core.image import MAX_IMAGE_BYTES, Image, image_url
from trioengine.core.image_header import MAX_SEGMENTS
from trioengine.text.conversation import Conversation, check_length

MIB = 1 << 20
CONTEXT = 8192  # tokens
WHERE = "messages[0].content[0]"
CHAT = chat_tokenizer()
ZEROS = zlib.compress(bytes(64 * MIB))  # 64 KiB


def bomb(width, height):
    """A PNG image of that size, whose pixels are there."""
    data = images.chunk(b"", ZEROS * 16)
    return images.png(width, height) + len(data).to_bytes(4, "big") + b"IDAT" + data


def padded(data, size=10 * MIB):
    return data + bytes(size - len(data))


PNG, JPEG, GIF, WEBP = (images.encoded(format, 50, 40) for format in ("PNG", "JPEG", "GIF", "WEBP"))
IMAGES = {
    "a PNG bomb": bomb(65_000, 65_000),
    "a PNG bomb of the largest size": bomb(8192, 8192),
    "a JPEG of 65,000 x 65,000": images.jpeg(images.frame(65_000, 65_000)),
    "a GIF of 65,000 x 65,000": images.gif(1, 1, images.gif_frame(65_000, 65_000)),
    "a WebP canvas of 16777216 x 16777216": images.webp(
        images.canvas(1 << 24, 1 << 24, 2), images.animation_frame(1, 1)
    ),
    "100,000 x 1": images.png(100_000, 1),
    "1 x 100,000": images.png(1, 100_000),
    "a truncated PNG": PNG[:30],
    "a truncated JPEG": JPEG[:100],
    "a truncated GIF": GIF[:12],
    "a truncated WebP": WEBP[:25],
    "no pixels": images.png(0, 40),
    "a wrong checksum": images.png(50, 40, error=1),
    "two frames": images.jpeg(images.frame(5, 5), images.frame(60_000, 5)),
    "a canvas that lies": images.webp(images.canvas(5, 5), images.lossy(16_000, 16_000)),
    "a JPEG of fill bytes": padded(b"\xff\xd8").replace(b"\0", b"\xff"),
    "a JPEG of empty segments": b"\xff\xd8" + b"\xff\xe0\0\2" * (10 * MIB // 4),
    "a GIF of blocks": images.gif(5, 5, b"!\xfe" + b"\1a" * (5 * MIB)),
    "a WebP of chunks": images.webp(images.canvas(5, 5), images.chunk(b"EXIF", b"") * MIB),
    "another format": padded(b"BM"),
    "nothing": b"",
    "an animated WebP": images.encoded("WEBP", 50, 40, frames=3),
    "an animated GIF": images.encoded("GIF", 50, 40, mode="L", frames=3),
    "CMYK": images.encoded("JPEG", 50, 40, mode="CMYK"),
    "16 bits": images.encoded("PNG", 50, 40, mode="I;16"),
    "10 MiB": padded(PNG),
    "as many segments as are read": images.jpeg(images.segment(0xE0) * (MAX_SEGMENTS - 2), images.frame(50, 40)),
}


def url_of(data):
    media_types = {b"\x89P": "image/png", b"\xff\xd8": "image/jpeg", b"GI": "image/gif", b"RI": "image/webp"}
    return f"data:{media_types.get(data[:2], 'image/png')};base64,{base64.b64encode(data).decode()}"


def named(url):
    return {"type": "image_url", "image_url": {"url": url}}


PARTS = {
    **{name: named(url_of(data)) for name, data in IMAGES.items()},
    "a JPEG that is called PNG": named(url_of(JPEG).replace("jpeg", "png", 1)),
    "a media type of text": named(url_of(PNG).replace("image/png", "text/html", 1)),
    "a long media type": named(f"data:{'a' * 10 * MIB};base64,QUJD"),
    "a URL": named("http://169.254.169.254/latest/meta-data"),
    "a URL in Realtime": {"type": "input_image", "image_url": "https://example.org/a.png"},
    "a path": named("file:///etc/passwd"),
    "no URL": {"type": "image_url", "image_url": {"url": ["data:"]}},
    "bad base64": named(url_of(PNG)[:-8] + "\n" + url_of(PNG)[-8:]),
    "bad base64 at the end": named(url_of(padded(PNG))[:-6] + "!" * 6),
    "base64 that is not ASCII": named(url_of(padded(PNG))[:-1] + "\U0001f600"),
    "padding within": named(url_of(PNG) + "=" * 4 * MIB),
    "too many bytes": named("data:image/png;base64," + "A" * (MAX_IMAGE_BYTES // 3 * 4 + 8)),
}


def answer(part):
    """The error's code and message, or the image's dimensions and its number of tokens."""
    try:
        url = image_url(part, WHERE)
        assert url is not None, part
        info, _ = source_of_url(url, MAX_IMAGE_BYTES, WHERE).open()
        prompt = [{"role": "user", "content": [Image(info, handle=None).part]}]
        check_length(prompt, CONTEXT, CHAT)
        Conversation(CHAT).prepare(prompt)
    except RequestRejected as exc:
        return [exc.code, exc.message]
    return [info.width, info.height]


def lines(part):
    """The lines of Python that run, which are the same at every run."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        answer(part)
    finally:
        sys.settrace(None)
    return count


def peak(part):
    tracemalloc.start()
    answer(part)
    size = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return size


if __name__ == "__main__":
    for name, part in PARTS.items():
        print(json.dumps([name, answer(part), lines(part), peak(part)]))
