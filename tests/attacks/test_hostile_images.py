"""Images of hostile clients: each is refused by an error that names its part, and costs the server's process little."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trioengine.core.image_header import MAX_SEGMENTS

TESTS = Path(__file__).parents[1]
CHILD = TESTS / "helpers/image_attacks.py"
LAST_RESORT = 3600  # seconds
MEMORY = 50 << 20  # bytes
LINES = 20 * MAX_SEGMENTS + 10_000  # of Python
WHERE = "messages[0].content[0]"
TOO_LARGE, BAD, FORMAT = "image_too_large", "image_parse_error", "invalid_image_format"
NOTHING_FETCHED = "invalid_image_url", "only data: URLs are accepted; the server fetches nothing"
NO_BASE64 = "invalid_base64_image", "the data is not base64"
REFUSED = {
    "a PNG bomb": (TOO_LARGE, "the image is 65000 x 65000 pixels; at most 67108864 pixels are accepted"),
    "a JPEG of 65,000 x 65,000": (TOO_LARGE, "the image is 65000 x 65000 pixels; at most 67108864 pixels are accepted"),
    "a GIF of 65,000 x 65,000": (TOO_LARGE, "the image is 65000 x 65000 pixels; at most 67108864 pixels are accepted"),
    "a WebP canvas of 16777216 x 16777216": (
        TOO_LARGE,
        "the image is 16777216 x 16777216 pixels; at most 12582912 pixels of a WebP image are accepted",
    ),
    "100,000 x 1": (TOO_LARGE, "the image is 100000 x 1 pixels; at most 16384 pixels a side are accepted"),
    "1 x 100,000": (TOO_LARGE, "the image is 1 x 100000 pixels; at most 16384 pixels a side are accepted"),
    "a truncated PNG": (BAD, "the PNG image is truncated"),
    "a truncated JPEG": (BAD, "the JPEG image is truncated"),
    "a truncated GIF": (BAD, "the GIF image is truncated"),
    "a truncated WebP": (BAD, "the WebP image is truncated"),
    "no pixels": (BAD, "the image is 0 x 40 pixels"),
    "a wrong checksum": (BAD, "the PNG image has a header whose checksum is wrong"),
    "two frames": (BAD, "the JPEG image has two frame headers"),
    "a canvas that lies": (BAD, "the WebP image has a canvas of 5 x 5 pixels, which its frame does not fit"),
    "a JPEG of fill bytes": (BAD, "the JPEG image has more than 4096 segments before its first scan"),
    "a JPEG of empty segments": (BAD, "the JPEG image has more than 4096 segments before its first scan"),
    "a GIF of blocks": (BAD, "the GIF image has more than 4096 blocks before its first frame"),
    "a WebP of chunks": (BAD, "the WebP image has more than 4096 chunks before its first frame"),
    "another format": (FORMAT, "not a PNG, JPEG, WebP or GIF image"),
    "nothing": (FORMAT, "the image is empty"),
    "a JPEG that is called PNG": (FORMAT, "declared image/png, but the data is a JPEG image"),
    "a media type of text": (
        "unsupported_image_media_type",
        "the media type must be image/png, image/jpeg, image/webp or image/gif, got 'text/html'",
    ),
    "a long media type": ("invalid_image_url", "a data: URL must begin with data:<media type>;base64,"),
    "a URL": NOTHING_FETCHED,
    "a URL in Realtime": NOTHING_FETCHED,
    "a path": NOTHING_FETCHED,
    "bad base64": NO_BASE64,
    "bad base64 at the end": NO_BASE64,
    "base64 that is not ASCII": NO_BASE64,
    "padding within": NO_BASE64,
    "too many bytes": ("image_file_too_large", "the data has 20971524 bytes; at most 20971520 are accepted"),
}
ACCEPTED = {
    "a PNG bomb of the largest size": [8192, 8192],
    "an animated WebP": [50, 40],
    "an animated GIF": [50, 40],
    "CMYK": [50, 40],
    "16 bits": [50, 40],
    "10 MiB": [50, 40],
    "as many segments as are read": [50, 40],
}


@pytest.fixture(scope="module")
def results():
    command = [sys.executable, str(CHILD)]
    paths = (str(TESTS), os.environ.get("PYTHONPATH", ""))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LAST_RESORT, env=environment)
    assert child.returncode == 0, child.stderr[-2000:]
    return {name: rest for name, *rest in map(json.loads, child.stdout.splitlines())}


@pytest.mark.parametrize(("name", "error"), REFUSED.items(), ids=REFUSED)
def test_hostile_images_are_refused(results, name, error):
    code, problem = error
    assert results[name][0] == [code, f"{WHERE}: {problem}"]


def test_a_part_without_a_url_is_refused(results):
    answer = ["invalid_value", f"{WHERE}.image_url.url must be a string, got ['data:']"]
    assert results["no URL"][0] == answer


@pytest.mark.parametrize(("name", "size"), ACCEPTED.items(), ids=ACCEPTED)
def test_strange_images_are_accepted(results, name, size):
    assert results[name][0] == size


def test_none_is_costly(results):
    """The lines that run are bounded by the segments that are read, the bytes by the data."""
    assert results.keys() == {*REFUSED, *ACCEPTED, "no URL"}
    costly = {name: cost for name, (_, *cost) in results.items() if cost[0] >= LINES or cost[1] >= MEMORY}
    assert costly == {}


def test_no_message_is_long(results):
    messages = [answer[1] for answer, *_ in results.values() if answer is not None and isinstance(answer[1], str)]
    assert max(map(len, messages)) < 200
    assert not any(re.search("Error|Traceback|struct", message) for message in messages)
