"""Requests with images are encoded tile by tile; tiles are found in the prefix cache, and survive a preemption."""

from __future__ import annotations

from dataclasses import replace

from helpers.image_bench import ImageBench

from trioengine.core.messages import AddSession
from trioengine.core.types import FinishReason, token_ids

# ---- tiles ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_before_the_first_tile_that_is_too_many() -> None:
    bench = ImageBench(max_tiles_per_step=2)
    bench.add(1, [1, (b"large", 5), 2], max_tokens=1)
    bench.run()
    assert bench.runner.steps == [([(1, 7)], [0, 1]), ([(1, 6)], [2, 3]), ([(1, 4)], [4])]


def test_a_tile_is_encoded_once_and_computed_in_several_chunks() -> None:
    bench = ImageBench(chunked_prefill_size=2, max_tiles_per_step=1)
    bench.add(1, [1, (b"wide", 2), 2], max_tokens=1)
    bench.run()
    assert bench.runner.steps == [([(1, 2)], [0]), ([(1, 2)], []), ([(1, 2)], [1]), ([(1, 2)], [])]


def test_what_comes_behind_a_prompt_that_was_cut_waits() -> None:
    bench = ImageBench(max_tiles_per_step=1)
    bench.add(1, [1, (b"wide", 3)], max_tokens=1)
    bench.add(2, [2, 2], max_tokens=1)
    bench.add(3, [3, b"other"], max_tokens=1)
    assert bench.step() == [(2, 2)]
    bench.decode()
    bench.decode()
    assert bench.step() == [(1, 4)]
    assert bench.step() == [(1, 3)]
    assert bench.step() == [(1, 3), (3, 1)]  # the text before the third one's image; the step's one tile is the first's
    assert bench.step() == [(3, 3)]
    bench.run()


def test_decodes_are_left_out_of_no_step_while_there_are_tiles_to_encode() -> None:
    limits = {"chunked_prefill_size": 4, "max_num_batched_tokens": 16, "max_tiles_per_step": 2}
    bench = ImageBench(**limits)
    bench.add(1, [1], max_tokens=20)
    bench.step()
    bench.add(2, [(b"large", 4), *[5] * 20], max_tokens=1)
    bench.step()
    bench.decode()
    steps = [bench.step() for _ in range(6)]
    assert steps[:3] == [[(1, 1), (2, 4)]] * 3
    assert steps[3:] == [[(2, 4)], [(2, 4)], [(2, 4)]]  # which have no tile to encode


# ---- the prefix cache -----------------------------------------------------------------------------------------------


def test_the_same_image_is_found_in_the_prefix_cache() -> None:
    bench = ImageBench(encoder_cache_memory=0)
    bench.add(1, [1, 2, b"cat", 3, 4, 5, 6], max_tokens=1)
    bench.run()
    bench.add(2, [1, 2, b"cat", 3, 4, 5, 7], max_tokens=1)
    bench.run()
    assert bench.cached_tokens == {1: 0, 2: 8}  # blocks of 4, short of the last token
    assert len(bench.runner.steps) == 2
    assert bench.runner.steps[1] == ([(2, 1)], [])
    assert bench.consumed == [1, 2]  # the second one was never decoded, and was kept for a preemption


def test_different_images_share_what_comes_before_them_alone() -> None:
    """In the first block are two tokens of text, which are copied, and two of the image, which are not."""
    bench = ImageBench()
    bench.add(1, [1, 2, b"cat", 3, 4, 5, 6], max_tokens=1)
    bench.run()
    bench.add(2, [1, 2, b"dog", 3, 4, 5, 6], max_tokens=1)
    bench.run()
    assert bench.cached_tokens == {1: 0, 2: 2}
    bench.add(3, [1, 2, *bench.prompts[1][0][2:5], 3, 4, 5, 6], max_tokens=1)  # image tokens, and no image
    bench.run()
    assert bench.cached_tokens[3] == 2


def test_images_in_another_order_are_another_prompt() -> None:
    bench = ImageBench(block_size=1)
    bench.add(1, [1, b"cat", b"dog", 2], max_tokens=1)
    bench.run()
    bench.add(2, [1, b"dog", b"cat", 2], max_tokens=1)
    bench.run()
    assert bench.cached_tokens == {1: 0, 2: 1}
    assert bench.ends == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH}


def test_a_prefix_that_ends_within_a_tile_is_used() -> None:
    """Three tokens of the image's second tile are cached, in a block whose other tokens are another text."""
    bench = ImageBench(block_size=8, encoder_cache_memory=0)
    bench.add(1, [1, (b"wide", 2), 2, 3], max_tokens=1)
    bench.run()
    bench.add(2, [1, (b"wide", 2), 9], max_tokens=1)
    bench.run()
    assert bench.cached_tokens == {1: 0, 2: 7}
    assert bench.runner.steps[-1] == ([(2, 1)], [])


# ---- preemption -----------------------------------------------------------------------------------------------------


def test_a_preempted_sequence_keeps_its_features() -> None:
    bench = ImageBench(kv_blocks_total=8, enable_prefix_caching=False, encoder_cache_memory=0)
    bench.add(1, [1] * 12, max_tokens=12)
    bench.add(2, [2, b"cat", *[2] * 8], max_tokens=6)
    bench.run()
    assert bench.core.statistics().num_preemptions > 0
    assert [encoded for _, encoded in bench.runner.steps if encoded] == [[0]]
    assert bench.ends.keys() == {1, 2}


def test_a_preempted_sequence_decodes_what_the_prefix_cache_has_lost() -> None:
    """The third request finds its image's tokens computed, and keeps the payload in case they are lost, as they are."""
    bench = ImageBench(kv_blocks_total=8, encoder_cache_memory=0)
    bench.add(1, [2, b"cat", 2, 2, 2, 2], max_tokens=1)
    bench.run()
    bench.add(2, [3] * 8, max_tokens=24)
    bench.add(3, [2, b"cat", 2, 2, 2, 2, 2], max_tokens=16)
    while not bench.core.statistics().num_preemptions:
        bench.step()
    assert bench.cached_tokens[3] == 8
    assert bench.outstanding == (2,)
    bench.run()
    assert bench.consumed == [1, 2]
    assert [encoded for _, encoded in bench.runner.steps if encoded] == [[0], [0]]
    assert bench.ends.keys() == {1, 2, 3}


def test_a_sequence_that_is_preempted_before_its_image_keeps_the_pixels() -> None:
    """Or it would leave the line again, be overtaken, and be preempted again."""
    bench = ImageBench(kv_blocks_total=5, chunked_prefill_size=1, enable_prefix_caching=False)
    bench.add(1, [1], max_tokens=19)
    bench.step()
    bench.add(2, [*[2] * 8, b"cat"], max_tokens=2)
    bench.step()
    bench.decode()
    for _ in range(8):
        bench.step()
    assert bench.core.statistics().num_preemptions == 1
    assert [encoded for _, encoded in bench.runner.steps if encoded] == []
    bench.run()
    assert bench.num_decoded == 1
    assert bench.ends.keys() == {1, 2}


def test_a_resumed_request_has_its_images() -> None:
    """Another worker gets the prompt and the first tokens of the answer."""
    bench = ImageBench()
    message = bench.message(1, [1, b"cat", 2], max_tokens=5)
    output = bench.expected(1)
    message = replace(message, token_ids=token_ids([*message.token_ids, *output[:2]]), num_output=2)
    bench.handle(AddSession(1), message)
    bench.arrive(1)
    while bench.core.has_work or len(bench.decoder):
        bench.decode() if len(bench.decoder) else bench.step()
    assert bench.answers[1] == output[2:]
