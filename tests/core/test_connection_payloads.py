"""The order of payloads: announced in ascending order, consumed once each, whatever becomes of their requests."""

import dataclasses

import msgpack
import pytest
from helpers.pair import STATISTICS, Pair, add_message, image, row, unchecked

from trioengine.core.codec import decode, encode
from trioengine.core.errors import LocalProtocolError, RemoteProtocolError
from trioengine.core.messages import AddSession, EndSession, PayloadConsumed, SessionEnded, StopSession, Tokens


def test_payloads_are_announced_and_consumed_once_each():
    pair = Pair()
    pair.down(AddSession(1), add_message(payloads=(3, 5)))
    assert pair.engine.payloads == pair.worker.payloads == {3, 5}
    pair.up(PayloadConsumed(5))
    assert pair.engine.payloads == pair.worker.payloads == {3}
    pair.up(Tokens((row(last=True),), STATISTICS))
    pair.down(add_message(request=2, payloads=(6,)))
    pair.up(PayloadConsumed(3), PayloadConsumed(6))
    assert pair.engine.payloads == frozenset()


def test_a_payload_outlives_its_request_and_its_session():
    pair = Pair()
    pair.down(AddSession(1), add_message(payloads=(1, 2)), StopSession(1, 1))
    pair.up(Tokens((row(last=True),), STATISTICS), PayloadConsumed(2))
    pair.down(EndSession(1))
    pair.up(SessionEnded(1, STATISTICS), PayloadConsumed(1))
    assert pair.worker.payloads == frozenset()


@pytest.mark.parametrize("payloads", [(4,), (3,), (5, 5), (6, 5)], ids=str)
def test_payloads_that_do_not_ascend_are_announced_by_nobody(payloads):
    pair = Pair()
    pair.down(AddSession(1), AddSession(2), add_message(payloads=(4,)))
    wrong = add_message(2, 2, payloads=payloads)
    with pytest.raises(LocalProtocolError, match="do not ascend from 4"):
        pair.engine.send(wrong)
    assert pair.engine.payloads == {4}
    pair.worker.receive_data(unchecked(wrong))
    with pytest.raises(RemoteProtocolError, match="do not ascend from 4"):
        pair.worker.next_message()


@pytest.mark.parametrize("payload", [2, 3], ids=["consumed", "not announced"])
def test_a_payload_is_consumed_once_and_after_its_announcement(payload):
    pair = Pair()
    pair.down(AddSession(1), add_message(payloads=(1, 2)))
    pair.up(PayloadConsumed(2))
    with pytest.raises(LocalProtocolError, match=f"payload {payload}, which was not announced"):
        pair.worker.send(PayloadConsumed(payload))
    pair.engine.receive_data(unchecked(PayloadConsumed(payload)))
    with pytest.raises(RemoteProtocolError, match=f"payload {payload}, which was not announced"):
        pair.engine.next_message()


def test_an_image_travels_as_it_is():
    message = add_message(payloads=(3, 5))
    assert decode(encode(message)).images == (image(3), image(5))


@pytest.mark.parametrize(
    ("field", "value"), [("digest", "text"), ("tiles", b"odd"), ("info", ["tiff", 1, 1]), ("info", ["png", 1])], ids=str
)
def test_images_that_are_none_are_refused(field, value):
    packed = msgpack.unpackb(encode(add_message(payloads=(3,))), strict_map_key=False)
    index = [each.name for each in dataclasses.fields(image(3))].index(field)
    packed["images"][index] = [value]
    with pytest.raises(RemoteProtocolError, match="ADD_MESSAGE"):
        decode(msgpack.packb(packed))
