"""Hostile images over the network: a 400 that names the part, whatever is wrong, and a server that serves others."""

import pytest
from helpers.clients import open_clients
from helpers.image_attacks import PARTS

from trioengine.testing.simulation import IMAGE_LIMITS

PLACE = "messages[0].content[0].image_url"
CASES = {
    "a PNG bomb": "image_too_large",
    "a WebP canvas of 16777216 x 16777216": "image_too_large",
    "a truncated JPEG": "image_parse_error",
    "a JPEG of empty segments": "image_parse_error",
    "two frames": "image_parse_error",
    "another format": "invalid_image_format",
    "nothing": "invalid_image_format",
    "a JPEG that is called PNG": "invalid_image_format",
    "a media type of text": "unsupported_image_media_type",
    "a URL": "invalid_image_url",
    "a path": "invalid_image_url",
    "bad base64 at the end": "invalid_base64_image",
    "base64 that is not ASCII": "invalid_base64_image",
    "padding within": "invalid_base64_image",
    "too many bytes": "image_file_too_large",
    "no URL": "invalid_type",
}


async def test_hostile_images_are_refused(autojump_clock):
    async with open_clients(limits=IMAGE_LIMITS) as clients:
        for name, code in CASES.items():
            answer = await clients.chat([PARTS[name]])
            assert (answer.status, answer.error["code"]) == (400, code), name
            assert answer.error["param"] == f"{PLACE}.url", name
            assert answer.error["message"].startswith(f"{PLACE}.url"), name
            assert len(answer.error["message"]) < 200
        assert clients.engine.statistics().payload_bytes_inflight == 0
        assert (await clients.chat()).status == 200


@pytest.mark.parametrize("name", ["a URL in Realtime"])
async def test_parts_of_another_protocol_are_refused(autojump_clock, name):
    async with open_clients(limits=IMAGE_LIMITS) as clients:
        answer = await clients.chat([PARTS[name]])
        assert (answer.status, answer.error["param"]) == (400, "messages[0].content[0].type")
