"""Encoded images: real ones, and headers written by hand."""

import io
import struct
import zlib

from PIL import Image

MODES = {
    "PNG": ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"),
    "JPEG": ("L", "RGB", "CMYK", "YCbCr"),
    "WEBP": ("L", "RGB", "RGBA"),
    "GIF": ("1", "L", "P", "RGB"),
}


def encoded(format, width=5, height=3, mode="RGB", **options):
    """What Pillow writes; `frames=n` makes an animation."""
    frames = [Image.new(mode, (width, height), 99 * index) for index in range(options.pop("frames", 1))]
    file = io.BytesIO()
    if len(frames) > 1:
        options |= {"save_all": True, "append_images": frames[1:]}
    frames[0].save(file, format, **options)
    return file.getvalue()


def png(width, height, *, length=13, kind=b"IHDR", error=0):
    header = kind + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    checksum = zlib.crc32(header) ^ error
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", length) + header + struct.pack(">I", checksum)


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def segment(marker, data=b""):
    return struct.pack(">BBH", 0xFF, marker, 2 + len(data)) + data


def frame(width, height, *, components=3, more=b""):
    return segment(0xC0, struct.pack(">BHHB", 8, height, width, components) + bytes(3 * components) + more)


def jpeg(*segments, scan=b"\xff\xda"):
    return b"\xff\xd8" + b"".join(segments) + scan


def gif(width, height, *blocks, flags=0):
    return b"GIF89a" + struct.pack("<HHBBB", width, height, flags, 0, 0) + b"".join(blocks)


def gif_frame(width, height, x=0, y=0):
    return b"," + struct.pack("<HHHHB", x, y, width, height, 0)


def comment(*texts):
    return b"!\xfe" + b"".join(bytes([len(text)]) + text for text in texts) + b"\0"


def chunk(kind, data):
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def webp(*chunks):
    content = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(content)) + content


def uint24(value):
    return struct.pack("<I", value)[:3]


def canvas(width, height, flags=0):
    return chunk(b"VP8X", bytes([flags, 0, 0, 0]) + uint24(width - 1) + uint24(height - 1))


def lossy(width, height, *, tag=b"\0\0\0", start=b"\x9d\x01\x2a"):
    return chunk(b"VP8 ", tag + start + struct.pack("<HH", width, height))


def lossless(width, height, *, signature=0x2F, version=0):
    return chunk(b"VP8L", struct.pack("<BI", signature, width - 1 | height - 1 << 14 | version << 29))


def animation_frame(width, height, x=0, y=0):
    place = uint24(x // 2) + uint24(y // 2)
    return chunk(b"ANMF", place + uint24(width - 1) + uint24(height - 1) + bytes(4) + lossy(width, height))


def exif(orientation, *, order="<", kind=3, before=(0x010F,), count=None):
    """A directory with the tags `before`, then an orientation."""
    tags = (*before, 0x0112)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    value = struct.pack(f"{order}I" if kind == 4 else f"{order}HH", *([orientation] if kind == 4 else [orientation, 0]))
    entries = [struct.pack(f"{order}HHI", tag, kind, 1) + value for tag in tags]
    return head + struct.pack(f"{order}H", len(tags) if count is None else count) + b"".join(entries) + bytes(4)
