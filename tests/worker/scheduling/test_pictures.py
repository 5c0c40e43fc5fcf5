"""Ids for the tokens of images, and books of pictures that notice being cooked."""

from __future__ import annotations

from array import array

import pytest
from helpers.image_bench import ImageBench

from trioengine.core.errors import InvariantError
from trioengine.worker.scheduling.block_pool import ROOT_DIGEST, block_digest
from trioengine.worker.scheduling.images import Picture, PictureStatus, Tile
from trioengine.worker.scheduling.pictures import Pictures, image_token_ids
from trioengine.worker.scheduling.sequence import SchedulerOutput


def test_ids_of_images_are_none_of_the_vocabulary_and_do_not_repeat() -> None:
    ids = image_token_ids(b"cat", 2000)
    assert len(set(ids)) == 2000
    assert max(ids) < -(1 << 62)
    assert ids[:500] == image_token_ids(b"cat", 500)
    assert set(ids).isdisjoint(image_token_ids(b"dog", 2000))


def test_blocks_with_images_have_digests_of_their_own() -> None:
    """Whatever their bytes: 8 bytes an id could spell a digest and 4 bytes an id."""
    ids = array("q", image_token_ids(b"cat", 8))
    halves = array("i", ids.tobytes())
    assert block_digest(ROOT_DIGEST, ids) != block_digest(halves.tobytes()[:32], halves[8:])
    assert block_digest(ROOT_DIGEST, ids) != block_digest(ROOT_DIGEST, halves)
    assert block_digest(ROOT_DIGEST, [1, *ids]) == block_digest(ROOT_DIGEST, [1, *ids])


def decoded() -> tuple[ImageBench, Pictures, Picture]:
    """A running request in the middle of its image, and one that is parked."""
    bench = ImageBench(max_tiles_per_step=1)
    bench.add(1, [1, (b"cat", 3)])
    bench.step()
    bench.decode()
    bench.step()
    pictures = bench.core._scheduler.pictures
    (picture,) = pictures._pictures.values()
    assert picture.status is PictureStatus.DECODED
    return bench, pictures, picture


def _forget_a_user(pictures: Pictures, picture: Picture) -> None:
    picture.num_users -= 1


def _forget_a_reader(pictures: Pictures, picture: Picture) -> None:
    picture.num_readers -= 1


def _lose_the_picture(pictures: Pictures, picture: Picture) -> None:
    del pictures._pictures[picture.digest]


def _lose_the_tiles(pictures: Pictures, picture: Picture) -> None:
    picture.tiles = None


def _lose_the_payload(pictures: Pictures, picture: Picture) -> None:
    picture.payload = None


def _call_it_complete(pictures: Pictures, picture: Picture) -> None:
    picture.status, picture.payload, picture.tiles = PictureStatus.COMPLETE, None, None


def _call_it_unused(pictures: Pictures, picture: Picture) -> None:
    pictures._unused[picture.digest] = None


def _consume_its_payload(pictures: Pictures, picture: Picture) -> None:
    assert picture.payload is not None
    pictures._payloads.consume(picture.payload)


def _keep_what_no_one_uses(pictures: Pictures, picture: Picture) -> None:
    pictures._pictures[b"other"] = Picture(b"other", picture.info, 3, 1, array("q"), features=[None])


def _keep_too_much(pictures: Pictures, picture: Picture) -> None:
    whole = Picture(b"other", picture.info, 3, 400, array("q"), PictureStatus.COMPLETE, features=[1] * 400)
    pictures._pictures[b"other"] = whole
    pictures._unused[b"other"] = None


@pytest.mark.parametrize(
    "harm",
    [
        _forget_a_user,
        _forget_a_reader,
        _lose_the_picture,
        _lose_the_tiles,
        _lose_the_payload,
        _call_it_complete,
        _call_it_unused,
        _consume_its_payload,
        _keep_what_no_one_uses,
        _keep_too_much,
    ],
)
def test_integrity_notices(harm):
    bench, pictures, picture = decoded()
    bench.core.check_integrity()
    harm(pictures, picture)
    with pytest.raises(InvariantError):
        bench.core.check_integrity()


def test_integrity_notices_who_waits_in_the_wrong_place() -> None:
    bench = ImageBench()
    bench.add(1, [1])
    bench.add(2, [2])
    waiting = bench.core._scheduler._waiting
    waiting.reverse()
    with pytest.raises(InvariantError, match="in the order"):
        bench.core.check_integrity()
    waiting.reverse()
    waiters = bench.core._scheduler._waiters
    waiters._parked.append(waiting.pop())
    with pytest.raises(InvariantError):
        bench.core.check_integrity()


def test_features_in_use_are_not_forgotten() -> None:
    _, pictures, _ = decoded()
    with pytest.raises(InvariantError, match="images are in use"):
        pictures.forget_all()


def test_a_runner_that_does_not_encode_is_noticed() -> None:
    bench = ImageBench()
    bench.add(1, [1, b"cat"])
    bench.step()
    bench.decode()
    scheduler = bench.core._scheduler
    output = scheduler.schedule()
    assert isinstance(output, SchedulerOutput)
    with pytest.raises(InvariantError, match="has not encoded tile 0"):
        scheduler.update(output, [])


def test_the_runner_is_told_which_rows_are_which_features() -> None:
    bench = ImageBench(chunked_prefill_size=5, max_tiles_per_step=2)
    bench.add(1, [1, 1, (b"cat", 2), 2])
    bench.step()
    bench.decode()
    output = bench.core._scheduler.schedule()
    assert output is not None
    (entry,) = output.scheduled
    (picture,) = bench.core._scheduler.pictures._pictures.values()
    assert output.encode == (Tile(picture, 0),)
    assert [tuple(piece) for piece in entry.tile_pieces] == [(Tile(picture, 0), 0, 3, 2)]
    entry.sequence.num_computed_tokens = 4  # the third token of the first tile, and all that follows
    assert [tuple(piece) for piece in entry.tile_pieces] == [(Tile(picture, 0), 2, 3, 0), (Tile(picture, 1), 0, 3, 1)]
