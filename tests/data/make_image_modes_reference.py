"""Write image_modes_reference.json: encoded images of every mode, and the digests of the tiles transformers makes.

As it loads a file, but for `convert("RGB")` there, which would show what a transparent pixel hides: the conversion is
that of its image processor. Needs pillow and transformers. Usage: python make_image_modes_reference.py
"""

import base64
import hashlib
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from transformers.models.idefics3 import Idefics3ImageProcessorPil

WIDTH, HEIGHT = 23, 14
TILE, EDGE = 16, 32


def picture():
    x, y = np.meshgrid(np.arange(WIDTH), np.arange(HEIGHT))
    return np.stack((x * 11, y * 17, (x * y) % 256), axis=-1).astype(np.uint8)


def with_alpha():
    alpha = np.linspace(0, 255, WIDTH * HEIGHT).astype(np.uint8).reshape(HEIGHT, WIDTH, 1)
    return Image.fromarray(np.concatenate((picture(), alpha), axis=-1))


def sixteen_bits():
    return Image.fromarray(np.linspace(0, 65535, WIDTH * HEIGHT).astype(np.uint16).reshape(HEIGHT, WIDTH))


def oriented(number):
    exif = Image.Exif()
    exif[0x0112] = number
    return {"exif": exif}


def cases():
    """Name, Pillow's format, image, and how it is saved."""
    rgb = Image.fromarray(picture())
    second = Image.fromarray(255 - picture())
    for mode in ("1", "L", "P", "RGB"):
        yield f"png {mode}", "PNG", rgb.convert(mode), {}
    yield "png LA", "PNG", with_alpha().convert("LA"), {}
    yield "png RGBA", "PNG", with_alpha(), {}
    yield "png I;16", "PNG", sixteen_bits(), {}
    yield "png P, one transparent color", "PNG", rgb.quantize(16), {"transparency": 3}
    yield "png P, alpha by color", "PNG", rgb.quantize(16), {"transparency": bytes(range(0, 256, 16))}
    yield "png RGB, one transparent color", "PNG", rgb, {"transparency": (0, 0, 0)}
    yield "png L, one transparent color", "PNG", rgb.convert("L"), {"transparency": 40}
    yield "jpeg L", "JPEG", rgb.convert("L"), {}
    yield "jpeg CMYK", "JPEG", rgb.convert("CMYK"), {}
    yield "jpeg progressive", "JPEG", rgb, {"progressive": True}
    for number in range(1, 9):
        yield f"jpeg turned {number}", "JPEG", rgb, oriented(number)
    yield "png turned 6", "PNG", rgb, oriented(6)
    yield "webp turned 8", "WEBP", rgb, oriented(8)
    yield "webp", "WEBP", rgb, {}
    yield "webp lossless", "WEBP", with_alpha(), {"lossless": True}
    yield "webp animation", "WEBP", rgb, {"save_all": True, "append_images": [second], "lossless": True}
    yield "gif", "GIF", rgb, {}
    yield "gif, one transparent color", "GIF", rgb.quantize(16), {"transparency": 3}
    yield "gif animation", "GIF", rgb, {"save_all": True, "append_images": [second]}


def main():
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": EDGE}, max_image_size={"longest_edge": TILE}, do_rescale=False, do_normalize=False
    )
    reference = {}
    for name, format, image, options in cases():
        file = io.BytesIO()
        image.save(file, format, **options)
        loaded = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
        tiles = processor([loaded], return_tensors="np")["pixel_values"][0].astype(np.uint8)
        reference[name] = {
            "format": format.lower(),
            "size": loaded.size,
            "data": base64.b64encode(file.getvalue()).decode(),
            "tiles": hashlib.sha256(tiles.tobytes()).hexdigest(),
        }
    lines = json.dumps(reference).replace('}, "', '},\n"')
    Path(__file__).with_name("image_modes_reference.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
