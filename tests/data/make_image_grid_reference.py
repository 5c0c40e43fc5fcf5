"""Write image_grid_reference.json: how transformers' Idefics3ImageProcessorPil cuts images of many sizes into tiles.

Its own code computes the sizes; only the pixels are left out, so that an image of 1 x 100000 costs nothing. Needs
transformers and pillow, which are no test dependencies. Usage: python make_image_grid_reference.py
"""

import json
import random
from pathlib import Path

import numpy as np
from transformers import image_processing_backends
from transformers.models.idefics3 import Idefics3ImageProcessorPil, Idefics3Processor

FORMATS = {  # tile, longest edge, splits
    "smolvlm-256m": (512, 2048, True),
    "smolvlm-2.2b": (384, 1536, True),
    "defaults": (364, 1456, True),
    "beyond 4096": (512, 5000, True),
    "smaller than a tile": (512, 100, True),
    "odd": (7, 61, True),
    "whole": (512, 2048, False),
}
TOKENS = 2  # of a tile, in the texts
EDGES = [1, 2, 3, 7, 8, 100, 255, 256, 511, 512, 513, 640, 1023, 1024, 1920, 2047, 2048, 2049, 4096, 4097, 9999, 100000]
NUM_RANDOM = 60


class Processor:
    """Idefics3Processor's own expansion, without a tokenizer."""

    fake_image_token, global_image_tag, image_token = "<fake_token_around_image>", "<global-img>", "<image>"
    image_seq_len = TOKENS
    replace_image_token = Idefics3Processor.replace_image_token


def sizes():
    fixed = [(1, 1), (1, 100000), (100000, 1), (640, 480), (480, 640), (1920, 1080), (3024, 4032), (65535, 65535)]
    rng = random.Random(0)
    some = [(rng.choice(EDGES), rng.choice(EDGES)) for _ in range(NUM_RANDOM)]
    return fixed + some + [(rng.randint(1, 5000), rng.randint(1, 5000)) for _ in range(NUM_RANDOM)]


def pixels(height, width):
    """One byte, seen as an array of any size."""
    return np.broadcast_to(np.zeros((), dtype=np.uint8), (3, height, width))


def grid(width, height, tile, edge, splits):
    """[width, height, rows, columns, width and height scaled, width and height of whole tiles]"""
    resized = []

    def resize(image, size, **_):
        resized.append((size[1], size[0]))
        return pixels(*size)

    image_processing_backends.np_resize = resize
    processor = Idefics3ImageProcessorPil(
        size={"longest_edge": edge}, max_image_size={"longest_edge": tile}, do_image_splitting=splits,
        do_rescale=False, do_normalize=False, do_pad=False, return_row_col_info=True,
    )  # fmt: skip
    answer = processor.preprocess([[pixels(height, width)]], input_data_format="channels_first")
    rows, columns = answer["rows"][0][0], answer["cols"][0][0]
    assert len(answer["pixel_values"][0]) == rows * columns + 1
    assert all(tile_.shape == (3, tile, tile) for tile_ in answer["pixel_values"][0])
    return [width, height, rows, columns, *resized[0], *resized[1]]


def text(rows, columns):
    return Processor().replace_image_token({"rows": [[rows]], "cols": [[columns]]}, 0)


def main():
    reference = {}
    for name, (tile, edge, splits) in FORMATS.items():
        grids = [grid(width, height, tile, edge, splits) for width, height in sizes()]
        texts = [text(row[2], row[3]) for row in grids[:5]]
        reference[name] = {"tile": tile, "edge": edge, "splits": splits, "texts": texts, "grids": grids}
    lines = json.dumps(reference).replace("], [", "],\n[").replace('}, "', '},\n"')
    Path(__file__).with_name("image_grid_reference.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
