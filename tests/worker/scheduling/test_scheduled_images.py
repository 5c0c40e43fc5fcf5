"""Requests with images: parked for payloads, and pictures that are shared and cached."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.image_bench import ImageBench

from trioengine.core.errors import RemoteProtocolError
from trioengine.core.messages import (
    AddSession,
    EndSession,
    PayloadConsumed,
    RequestFailed,
    SessionEnded,
    Sleep,
    Slept,
    StopSession,
    UpdateWeights,
)
from trioengine.core.types import FinishReason
from trioengine.testing.simulated_process import SimulatedPayload
from trioengine.testing.toy_model import TOY_TILE
from trioengine.worker.scheduling.images import PayloadArrived, TileShape

# ---- payloads -------------------------------------------------------------------------------------------------------


def test_a_request_waits_for_its_payloads_and_then_for_its_image() -> None:
    bench = ImageBench()
    assert bench.handle(AddSession(1), bench.message(1, [1, b"cat", 2, b"dog"])) == []
    assert (bench.core.requests, bench.core.has_work, bench.outstanding) == ((1,), False, (1, 2))
    assert bench.core.statistics().num_waiting == 1
    assert bench.arrive(2) == []
    assert not bench.core.has_work
    assert bench.arrive(1) == []
    assert bench.core.has_work
    assert bench.step() == []
    assert not bench.core.has_work
    bench.decode()
    assert not bench.core.has_work
    bench.decode()
    assert bench.step() == [(1, 8)]
    assert bench.consumed == [1, 2]
    bench.run()
    assert bench.ends == {1: FinishReason.LENGTH}
    assert (bench.outstanding, bench.core.num_payloads) == ((), 0)


def test_a_payload_may_come_before_its_message() -> None:
    bench = ImageBench()
    message = bench.message(1, [1, b"cat"])
    bench.arrive(1)
    assert (bench.outstanding, bench.core.num_payloads) == ((), 1)
    bench.handle(AddSession(1), message)
    assert bench.outstanding == (1,)
    bench.run()
    assert bench.ends == {1: FinishReason.LENGTH}


def test_a_text_does_not_wait_for_the_images_of_others() -> None:
    bench = ImageBench()
    bench.handle(AddSession(1), bench.message(1, [1, b"cat"]))
    bench.add(2, [1, 2, 3])
    bench.run()
    assert bench.ends == {2: FinishReason.LENGTH, 1: FinishReason.LENGTH}


@pytest.mark.parametrize("is_here", [True, False], ids=["payload here", "payload on its way"])
def test_a_stop_settles_a_parked_request_at_once(is_here: bool) -> None:
    bench = ImageBench()
    bench.handle(AddSession(1), bench.message(1, [1, b"cat", b"dog"]))
    source = bench.sent[1]
    if is_here:
        bench.arrive(1)
    replies = bench.handle(StopSession(1, 1))
    assert bench.ends == {1: FinishReason.ABORT}
    assert (PayloadConsumed(1) in replies) is is_here
    assert bench.core.requests == ()
    left = [1, 2][is_here:]
    assert bench.outstanding == tuple(left)
    assert bench.arrive(*left) == [PayloadConsumed(payload) for payload in left]
    assert not source.is_open
    assert bench.outstanding == ()


def test_an_end_settles_a_parked_request_at_once() -> None:
    bench = ImageBench()
    bench.handle(AddSession(1), bench.message(1, [1, b"cat", b"dog"]))
    bench.arrive(2)
    ended, consumed = bench.handle(EndSession(1))
    assert isinstance(ended, SessionEnded)
    assert consumed == PayloadConsumed(2)
    assert bench.outstanding == (1,)
    assert bench.arrive(1) == [PayloadConsumed(1)]


def test_a_refused_request_s_payloads_are_consumed() -> None:
    bench = ImageBench()
    message = bench.message(1, [*[1] * 60, b"cat", b"dog"])
    bench.arrive(2)
    failed, consumed = bench.handle(AddSession(1), message)
    assert isinstance(failed, RequestFailed)
    assert failed.code == "context_length_exceeded"
    assert consumed == PayloadConsumed(2)
    assert bench.arrive(1) == [PayloadConsumed(1)]


@pytest.mark.parametrize(
    ("tiles", "said"),
    [
        ([2, 1], "a tile begins at token 1, before 5"),
        ([1, 3], "a tile begins at token 3, before 4"),
        ([-1], "a tile begins at token -1, before 0"),
        ([4], "a tile ends at token 7, and the prompt has 6"),
        ([], "the image has no tiles"),
    ],
    ids=str,
)
def test_tiles_that_do_not_lie_in_the_prompt_are_refused(tiles: list[int], said: str) -> None:
    bench = ImageBench()
    message = replace(bench.message(1, [1, 2, 3, 4, 5, 6]), images=(bench.image(b"cat", tiles),))
    (failed,) = bench.handle(AddSession(1), message)
    assert isinstance(failed, RequestFailed)
    assert failed.code == "invalid_value"
    assert said in failed.message
    assert bench.arrive(1) == [PayloadConsumed(1)]


def test_output_tokens_are_no_place_for_a_tile() -> None:
    bench = ImageBench()
    message = replace(bench.message(1, [1, 2, 3, b"cat"]), num_output=1)
    (failed,) = bench.handle(AddSession(1), message)
    assert isinstance(failed, RequestFailed)
    assert failed.message == "a tile ends at token 6, and the prompt has 5"


def test_a_model_without_images_refuses_them() -> None:
    bench = ImageBench(tile=None)
    (failed,) = bench.handle(AddSession(1), bench.message(1, [1, b"cat"]))
    assert failed == RequestFailed(1, 1, "invalid_value", "messages[0].content[1]: the model takes no images")
    assert bench.arrive(1) == [PayloadConsumed(1)]


def test_what_is_no_tile_is_refused() -> None:
    with pytest.raises(ValueError, match="a tile must have tokens, pixels and features"):
        TileShape(0, 1, 1)


@pytest.mark.parametrize("is_early", [True, False], ids=["early", "late"])
def test_a_payload_of_another_length_breaks_the_protocol(is_early: bool) -> None:
    bench = ImageBench()
    message = bench.message(1, [1, b"cat"])
    source = SimulatedPayload(b"a cat")
    arrived = PayloadArrived(1, source)
    bench.handle(AddSession(1))
    with pytest.raises(RemoteProtocolError, match="payload 1 has 5 bytes, and ADD_MESSAGE announced 3"):
        for event in [arrived, message] if is_early else [message, arrived]:
            bench.core.handle(event)
    assert not source.is_open


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_payload_that_comes_twice_breaks_the_protocol(is_announced: bool) -> None:
    bench = ImageBench()
    message = bench.message(1, [1, b"cat"])
    if is_announced:
        bench.handle(AddSession(1), message)
    bench.arrive(1)
    source = SimulatedPayload(b"cat")
    with pytest.raises(RemoteProtocolError, match="payload 1 has come already"):
        bench.core.handle(PayloadArrived(1, source))
    assert not source.is_open


def test_different_images_with_the_same_digest_break_the_protocol() -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    same = bench.image(b"cat", [0])
    message = replace(bench.message(2, [1] * 9), images=(replace(same, num_bytes=4),))
    bench.handle(AddSession(2))
    with pytest.raises(RemoteProtocolError, match="differs from an image with the same digest"):
        bench.core.handle(message)


# ---- shared pictures, and the encoder cache -------------------------------------------------------------------------


def test_the_same_image_is_decoded_and_encoded_once() -> None:
    bench = ImageBench(enable_prefix_caching=False)
    bench.add(1, [1, b"cat", 2, b"cat"])
    bench.add(2, [3, b"cat"])
    assert bench.consumed == [2, 3]  # the first one is all that is needed
    bench.run()
    assert [number for _, encoded in bench.runner.steps for number in encoded] == [0]
    assert sorted(bench.consumed) == [1, 2, 3]
    assert bench.ends == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}


def test_a_request_that_ends_leaves_its_payload_to_others() -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.add(2, [2, b"cat"])
    assert bench.consumed == [2]
    bench.handle(EndSession(1))
    assert (bench.consumed, bench.outstanding) == ([2], (1,))
    bench.run()
    assert bench.consumed == [2, 1]
    assert bench.ends == {2: FinishReason.LENGTH}


def test_an_image_in_the_encoder_cache_needs_no_payload() -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat", 2])
    bench.run()
    bench.handle(AddSession(2), bench.message(2, [3, b"cat", 4]))
    assert bench.step() == [(2, 5)]
    assert bench.runner.steps[-1][1] == []
    assert bench.arrive(2) == [PayloadConsumed(2)]
    bench.run()
    assert bench.ends[2] is FinishReason.LENGTH
    statistics = bench.core.statistics()
    assert (statistics.encoder_cache_queries, statistics.encoder_cache_hits) == (2, 1)


def test_the_encoder_cache_forgets_what_was_unused_for_the_longest_time() -> None:
    bench = ImageBench(encoder_cache_memory=2 * TOY_TILE.feature_bytes, enable_prefix_caching=False)
    for number, data in enumerate([b"a", b"b", b"a", b"c", b"a", b"b"], 1):
        bench.add(number, [1, data])
        bench.run()
    encoded = [bool(encoded) for scheduled, encoded in bench.runner.steps if scheduled[0][1] > 1]
    assert encoded == [True, True, False, True, False, True]


def test_an_image_larger_than_the_encoder_cache_is_not_kept() -> None:
    bench = ImageBench(encoder_cache_memory=TOY_TILE.feature_bytes)
    bench.add(1, [1, (b"large", 2)])
    bench.run()
    assert bench.core._scheduler.pictures.cached_bytes == 0


def test_a_request_that_fails_leaves_no_features() -> None:
    """They may be the reason: not finite, say."""
    bench = ImageBench()
    bench.runner.fail_requests = {1}
    bench.add(1, [1, b"cat"])
    bench.run()
    assert bench.failures == {1: ("sampling_failed", "failed on request")}
    bench.add(2, [1, b"cat"])
    bench.run()
    assert bench.ends == {2: FinishReason.LENGTH}
    assert [encoded for _, encoded in bench.runner.steps if encoded] == [[0], [0]]


@pytest.mark.parametrize("change", [Sleep(), UpdateWeights("others", 2)], ids=["sleep", "update"])
def test_no_features_outlive_the_weights(change: Sleep | UpdateWeights) -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.run()
    bench.handle(EndSession(1), change)
    assert bench.core._scheduler.pictures.cached_bytes == 0
    bench.core.check_integrity()


def test_memory_sleeps_while_an_image_is_decoded_for_nobody() -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.step()
    bench.decoder.decode()
    bench.handle(EndSession(1))
    assert bench.outstanding == (1,)
    assert bench.handle(Sleep()) == [Slept()]
    assert bench.core.handle(bench.decoded.pop()) == [PayloadConsumed(1)]
    bench.core.check_integrity()


def test_waiting_requests_keep_no_more_features_than_the_cache_has_room_for() -> None:
    """Each conversation asks again as soon as it is answered, and waits in a line behind the others."""
    memory = 2 * TOY_TILE.feature_bytes
    bench = ImageBench(max_num_seqs=1, encoder_cache_memory=memory, enable_prefix_caching=False)
    conversations = range(1, 7)
    for number in conversations:
        bench.add(number, [number, b"image %d" % number], max_tokens=1)
    for number in conversations:
        while number not in bench.ends:
            bench.decode() if len(bench.decoder) else bench.step()
        bench.add(10 + number, [number, b"image %d" % number, 5], max_tokens=1)
    assert bench.core._scheduler.pictures.used_bytes == memory
    assert len(bench.outstanding) == 4
    bench.run()
    assert len(bench.ends) == 12
    assert bench.num_decoded == 10
