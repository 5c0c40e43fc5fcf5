"""Hostile images whose headers are accepted: refused ones cost the worker little, and all others have a bound."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from trioengine.core.image_header import MAX_PIXELS, MAX_WEBP_PIXELS
from trioengine.worker.image_decoding import DECODE_SECONDS

TESTS = Path(__file__).parents[1]
CHILD = Path(__file__).with_name("decode_attacks.py")
LAST_RESORT = 3600  # seconds
SECONDS, MEMORY = 0.1, 50 << 20  # of processor time, and bytes
NUM_PIXELS = 4096 * 4096
NO_PNG, NO_JPEG, NO_WEBP = (
    f"the image is not a {name} image, or is truncated or damaged" for name in ("PNG", "JPEG", "WebP")
)
CHEAP = {
    "a PNG bomb of the largest size": "the PNG image is truncated or damaged",
    "an animated WebP": [50, 40],
    "an animated GIF": [50, 40],
    "CMYK": [50, 40],
    "16 bits": [50, 40],
    "10 MiB": [50, 40],
    "as many segments as are read": NO_JPEG,
    "a large PNG without pixels": NO_PNG,
    "a large JPEG without a scan": NO_JPEG,
    "a large progressive JPEG without pixels": "the JPEG image is truncated or damaged",
    "a large GIF without pixels": "the GIF image is truncated or damaged",
    "a large WebP without pixels": NO_WEBP,
    "a large lossless WebP without pixels": "the WebP image is truncated or damaged",
    "a WebP canvas of 4096 x 3072": NO_WEBP,
    "EXIF that is a hundred times itself": [50, 40],
    "100 MiB of text": NO_PNG,
}
LARGE = {  # bytes of memory that a pixel takes, as in docs/models.md
    "large: PNG": 4,
    "large: a PNG of one row": 4,
    "large: a PNG of 16 bits with alpha, interlaced": 8,
    "large: GIF": 8,
    "large: JPEG": 4,
    "large: CMYK": 8,
    "large: a progressive JPEG": 12,
    "large: progressive CMYK": 12,
    "large: WebP": 16,
    "large: a turned WebP": 16,
    "large: a WebP animation": 16,
    "large: a lossless WebP with alpha": 16,
}
SLOW = {"a JPEG of 10,000 scans": "JPEG", "a PNG of 10,000 color profiles": "PNG"}


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, str(CHILD)]
    paths = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "MALLOC_MMAP_THRESHOLD_": "1000000"}
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LAST_RESORT, env=environment)
    assert child.returncode == 0, child.stderr[-2000:]
    found = defaultdict(list)
    for name, *run in map(json.loads, child.stdout.splitlines()):
        found[name].append(run)
    assert found.keys() == {*CHEAP, *LARGE, *SLOW}
    return {name: combined(*zip(*runs, strict=True)) for name, runs in found.items()}


def combined(answers, seconds, memory):
    """Return the answer of several runs, the processor time of the fastest, and the largest memory."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0], min(seconds), max(memory)


@pytest.mark.parametrize(("name", "answer"), CHEAP.items(), ids=CHEAP)
def test_what_is_refused_or_small_costs_little(results, name, answer):
    found, seconds, memory = results[name]
    assert found == answer
    assert seconds < SECONDS
    assert memory < MEMORY


@pytest.mark.parametrize(("name", "bytes_a_pixel"), LARGE.items(), ids=LARGE)
def test_a_large_image_takes_memory_and_time_by_its_pixels(results, name, bytes_a_pixel):
    """The time is one in which the largest image takes less than its deadline."""
    _, seconds, memory = results[name]
    num_pixels = MAX_WEBP_PIXELS if "WebP" in name else NUM_PIXELS
    assert memory < (bytes_a_pixel + 1.5) * num_pixels
    assert seconds < DECODE_SECONDS * num_pixels / MAX_PIXELS


@pytest.mark.parametrize(("name", "format"), SLOW.items(), ids=SLOW)
def test_what_is_slow_by_intent_ends_soon_after_its_deadline(results, name, format):
    """Without one the first takes minutes; between two looks at the clock it has 25 scans."""
    found, seconds, _ = results[name]
    assert found == f"the {format} image takes more than 0.2 s to decode"
    assert seconds < DECODE_SECONDS
