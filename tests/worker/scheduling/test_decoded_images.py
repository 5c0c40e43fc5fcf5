"""Requests with images leave the line until these are decoded, and keep the pixels while they need them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.image_bench import BAD, ImageBench

from trioengine.core.messages import AddSession, EndSession, PayloadConsumed, RequestFailed, StopSession
from trioengine.core.types import FinishReason
from trioengine.testing.toy_model import TOY_TILE
from trioengine.worker.scheduling.image_queue import DECODED_MEMORY, PictureDecoded, decode_picture
from trioengine.worker.scheduling.images import DecodedImage

HALF = DECODED_MEMORY // TOY_TILE.decoded_bytes // 2  # tiles that take half of the memory for decoded ones


def test_a_sequence_comes_back_to_its_place_when_it_is_decoded() -> None:
    bench = ImageBench(max_num_seqs=1)
    bench.add(1, [1, 1], max_tokens=2)
    bench.add(2, [1, b"cat"])
    bench.add(3, [3, 3], max_tokens=2)
    bench.add(4, [4, 4], max_tokens=2)
    assert [bench.step() for _ in range(3)] == [[(1, 2)], [(1, 1)], [(3, 2)]]  # 2 has left the line for its image
    bench.decode()
    assert [bench.step() for _ in range(2)] == [[(3, 1)], [(2, 4)]]
    bench.run()
    assert list(bench.ends) == [1, 3, 2, 4]


def test_an_image_that_cannot_be_decoded_fails_its_request_alone() -> None:
    bench = ImageBench()
    bench.add(1, [1, BAD, b"dog"])
    bench.add(2, [1, 2])
    bench.step()
    assert len(bench.decoder) == 2
    assert bench.decode() == [
        RequestFailed(1, 1, "invalid_image", "messages[0].content[1]: the toy model cannot read it"),
        PayloadConsumed(1),
        PayloadConsumed(2),
    ]
    assert len(bench.decoder) == 0  # the other image is not decoded for nobody
    bench.run()
    assert bench.ends == {2: FinishReason.LENGTH}
    assert bench.core.held_tokens(1).tolist() == bench.prompts[1][0]


def test_two_requests_with_the_same_bad_image_fail_each_for_itself() -> None:
    bench = ImageBench()
    bench.add(1, [1, BAD])
    bench.add(2, [2, BAD])
    bench.run()
    assert bench.failures.keys() == {1, 2}
    assert sorted(bench.consumed) == [1, 2]


def test_an_image_of_other_tiles_than_announced_fails_its_request() -> None:
    bench = ImageBench()
    message = bench.message(1, [1, (b"cat", 2)])
    info = replace(message.images[0].info, width=8)
    bench.handle(AddSession(1), replace(message, images=(replace(message.images[0], info=info),)))
    bench.arrive(1)
    bench.run()
    assert bench.failures[1][1].endswith(": the image has 1 tiles, and 2 in the prompt")


def test_a_decoder_never_raises() -> None:
    def fail(data: memoryview, info: object) -> DecodedImage:
        raise KeyError("table")

    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.step()
    picture = bench.decoder._pictures[0]
    assert decode_picture(picture, fail) == PictureDecoded(picture, None, "KeyError: 'table'")


@pytest.mark.parametrize("end", [StopSession(1, 1), EndSession(1)], ids=["stop", "end"])
def test_an_end_takes_images_from_the_decoder(end: StopSession | EndSession) -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.step()
    assert len(bench.decoder) == 1
    assert bench.handle(end)[-1] == PayloadConsumed(1)
    assert len(bench.decoder) == 0


def test_an_image_that_is_being_decoded_is_closed_when_that_is_done() -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.step()
    bench.decoder.decode()  # the thread has it, and reads its bytes
    assert len(bench.handle(StopSession(1, 1))) == 1
    assert (bench.outstanding, bench.core.num_payloads) == ((1,), 1)
    assert bench.core.handle(bench.decoded.pop()) == [PayloadConsumed(1)]


def test_an_image_that_is_being_decoded_is_found_by_the_next_request() -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.step()
    bench.decoder.decode()
    bench.handle(StopSession(1, 1))
    bench.add(2, [2, b"cat"])
    assert bench.consumed == [2]
    bench.step()
    assert len(bench.decoder) == 0
    bench.core.handle(bench.decoded.pop())
    assert bench.step() == [(2, 4)]


def test_the_next_one_is_decoded_when_the_first_one_ends() -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.add(2, [2, b"dog"])
    bench.step()
    bench.handle(StopSession(1, 1))
    assert len(bench.decoder) == 1
    bench.decode()
    assert bench.step() == [(2, 4)]


def test_a_bad_image_that_is_decoded_for_nobody_fails_nobody() -> None:
    bench = ImageBench()
    bench.add(1, [1, BAD])
    bench.add(2, [2, b"dog"])
    bench.step()
    bench.decoder.decode()
    bench.handle(StopSession(1, 1))
    assert bench.core.handle(bench.decoded.pop()) == [PayloadConsumed(1)]
    bench.run()
    assert bench.ends[2] is FinishReason.LENGTH


def with_a_cached_tile() -> ImageBench:
    """The second request is decoded; its image's first tile is in the prefix cache, and has no features."""
    bench = ImageBench(max_tiles_per_step=1)
    bench.add(1, [1, (b"cat", 2)])
    bench.step()
    bench.decode()
    assert bench.step() == [(1, 4)]
    bench.handle(EndSession(1))
    bench.add(2, [1, (b"cat", 2)])
    bench.step()
    bench.decode()
    return bench


def test_pixels_stay_for_all_that_are_about_to_compute_them() -> None:
    """The second request is done with them; the third has just begun."""
    bench = with_a_cached_tile()
    bench.add(3, [9, (b"cat", 2)])
    assert bench.step() == [(2, 3), (3, 1)]
    bench.run()
    assert bench.num_decoded == 2
    assert bench.ends == {2: FinishReason.LENGTH, 3: FinishReason.LENGTH}


def test_pixels_go_when_the_prompt_is_computed() -> None:
    bench = with_a_cached_tile()
    assert bench.step() == [(2, 3)]
    assert bench.runner.steps[-1] == ([(2, 3)], [1])
    assert (bench.outstanding, bench.core._scheduler.pictures.decoded_bytes) == ((2,), 0)
    bench.run()
    assert bench.ends == {2: FinishReason.LENGTH}


def test_a_sequence_that_leaves_the_line_again_keeps_no_pixels_meanwhile() -> None:
    """The first image is in the prefix cache at first, and is evicted while the sequence waits for blocks."""
    bench = ImageBench(kv_blocks_total=8, encoder_cache_memory=0)
    bench.add(1, [2, b"cat"], max_tokens=2)
    bench.run()
    bench.add(2, [3] * 8, max_tokens=23)
    bench.add(3, [2, b"cat", 2, b"dog"], max_tokens=1)
    for _ in range(16):
        bench.step()
    bench.decode()
    pictures = bench.core._scheduler.pictures
    assert pictures.decoded_bytes == TOY_TILE.decoded_bytes
    while 2 not in bench.ends:
        bench.step()
    assert bench.step() == []
    assert (len(bench.decoder), pictures.decoded_bytes) == (2, 2 * TOY_TILE.decoded_bytes)
    bench.decode()
    bench.run()
    assert bench.num_decoded == 4
    assert bench.ends[3] is FinishReason.LENGTH


def test_decoded_tiles_have_room_for_one_request_after_the_other() -> None:
    """The third fits beside the first, but is not begun before the second."""
    bench = ImageBench(max_num_seqs=1, enable_prefix_caching=False)
    bench.add(1, [1, (b"a", HALF)], max_tokens=1)
    bench.add(2, [1, (b"b", HALF + 1)], max_tokens=1)
    bench.add(3, [1, (b"c", HALF)], max_tokens=1)
    bench.step()
    pictures = bench.core._scheduler.pictures
    assert (len(bench.decoder), pictures.decoded_bytes) == (1, DECODED_MEMORY // 2)
    bench.decode()
    assert (len(bench.decoder), pictures.decoded_bytes) == (0, DECODED_MEMORY // 2)
    bench.step()
    assert len(bench.decoder) == 1
    bench.run()
    assert list(bench.ends) == [1, 2, 3]


def test_a_request_larger_than_the_room_is_decoded_alone() -> None:
    bench = ImageBench()
    bench.add(1, [1, (b"huge", 3 * HALF)], max_tokens=1)
    bench.run()
    assert bench.ends == {1: FinishReason.LENGTH}
