"""Two connections joined by a fake link; the order of messages; misuse and bad peers."""

import dataclasses
from typing import get_args

import hypothesis.strategies as st
import msgpack
import pytest
from helpers.pair import EVERY_MESSAGE, PARAMS, STATISTICS, Pair, add_message, row, unchecked
from hypothesis import given

from trioengine.core.codec import LENGTH, decode, encode, frame
from trioengine.core.config import MAX_SESSIONS, WorkerConfig
from trioengine.core.connection import MIN_FRAME_LIMIT, RULES, Connection, Role
from trioengine.core.errors import FrameTooLarge, LocalProtocolError, RemoteProtocolError
from trioengine.core.image import ImageFormat, ImageInfo
from trioengine.core.messages import (
    WIRE_NAMES,
    Activity,
    AddSession,
    Audit,
    Audited,
    Configure,
    EndSession,
    Fatal,
    FatalCode,
    FromWorker,
    ImageInput,
    Loading,
    Ping,
    Pong,
    Ready,
    RequestFailed,
    SessionEnded,
    Shutdown,
    StopSession,
    Tokens,
    ToWorker,
)
from trioengine.core.types import FinishReason, token_ids


def test_every_message_is_here():
    assert {type(message) for message in EVERY_MESSAGE} == set(WIRE_NAMES)


def test_every_message_has_a_rule_and_its_sender():
    senders = dict.fromkeys(get_args(ToWorker), Role.ENGINE) | dict.fromkeys(get_args(FromWorker), Role.WORKER)
    assert {message: rule.sender for message, rule in RULES.items()} == senders


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: WIRE_NAMES[type(message)])
def test_encode_and_decode(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EVERY_MESSAGE, ids=lambda message: WIRE_NAMES[type(message)])
def test_a_field_of_a_wrong_type_is_refused(message):
    for field in dataclasses.fields(message):
        packed = msgpack.unpackb(encode(message), strict_map_key=False)
        packed[field.name] = {"an": "unexpected map"}
        with pytest.raises(RemoteProtocolError, match=WIRE_NAMES[type(message)]):
            decode(msgpack.packb(packed))
        del packed[field.name]
        with pytest.raises(RemoteProtocolError, match=f"{WIRE_NAMES[type(message)]}: unexpected or missing fields"):
            decode(msgpack.packb(packed))


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (msgpack.packb([1]), "not a map"),
        (msgpack.packb({"type": 3}), "not a map"),
        (msgpack.packb({"type": "HELLO"}), "HELLO"),
        (msgpack.packb({"type": "ADD_SESSION", "session": True}), "ADD_SESSION"),
        (msgpack.packb({"type": "TOKENS", "rows": 3, "statistics": list(range(10))}), "array"),
        (msgpack.packb({"type": "TOKENS", "rows": [[1]], "statistics": list(range(10))}), "TokensRow"),
        (msgpack.packb({"type": "PONG", "ping": 1, "progress": 1, "activity": "tired", "seconds": 1}), "tired"),
        (msgpack.packb({"type": "PONG", "ping": 1, "progress": 1, "activity": "idle", "seconds": "1"}), "float"),
        (msgpack.packb({"type": "FATAL", "code": "hunger", "message": "", "traceback": ""}), "hunger"),
        (msgpack.packb({"type": "PONG", "ping": 1, "progress": 1, "activity": [], "seconds": 1}), "Activity"),
    ],
)
def test_payloads_that_are_no_message(payload, why):
    with pytest.raises(RemoteProtocolError, match=why):
        decode(payload)


def test_parameters_of_a_wrong_type_are_refused():
    """Their ranges are checked where they are made, in the engine."""
    packed = msgpack.unpackb(encode(add_message()), strict_map_key=False)
    packed["params"][1] = "hot"
    with pytest.raises(RemoteProtocolError, match="ADD_MESSAGE: params: temperature: expected float, got str"):
        decode(msgpack.packb(packed))
    packed["params"][1] = 1
    assert type(decode(msgpack.packb(packed)).params.temperature) is float
    packed["params"][1] = 0.5
    assert decode(msgpack.packb(packed)).params == dataclasses.replace(PARAMS, temperature=0.5)
    packed["token_ids"] = b"odd"
    with pytest.raises(RemoteProtocolError, match="int32"):
        decode(msgpack.packb(packed))
    packed["token_ids"], packed["params"][13] = b"", [1]
    with pytest.raises(RemoteProtocolError, match="map"):
        decode(msgpack.packb(packed))


def test_big_endian_machines_swap(monkeypatch):
    little = encode(add_message())
    monkeypatch.setattr("trioengine.core.codec.sys.byteorder", "big")
    assert encode(add_message()) != little
    assert decode(encode(add_message())) == add_message()


def test_what_cannot_be_packed_is_our_fault():
    with pytest.raises(LocalProtocolError, match="ADD_SESSION"):
        encode(AddSession(2**70))
    with pytest.raises(LocalProtocolError, match="ADD_SESSION cannot be packed: msgpack has no type for object"):
        encode(AddSession(object()))


@given(st.binary(max_size=200))
def test_garbage_is_a_remote_protocol_error_or_nothing(data):
    connection = Connection(Role.ENGINE)
    connection.receive_data(data)
    for _ in range(2):
        try:
            while connection.next_message() is not None:
                pass
        except RemoteProtocolError:
            pass


@given(st.binary(max_size=120))
def test_garbage_payloads(data):
    connection = Connection(Role.WORKER)
    connection.receive_data(frame(data))
    with pytest.raises(RemoteProtocolError):
        connection.next_message()


def test_a_whole_life():
    pair = Pair()
    pair.down(AddSession(1), add_message())
    assert pair.engine.sessions == pair.engine.open_sessions == pair.worker.sessions == {1}
    pair.up(Tokens((row(),), STATISTICS))
    pair.down(StopSession(1, 1))
    pair.up(Tokens((row(last=True),), STATISTICS))
    pair.down(StopSession(1, 1))  # it crossed the finish: legal
    pair.down(add_message(request=2))
    pair.up(RequestFailed(1, 2, "nan", "logits are not finite"))
    pair.down(add_message(request=3), EndSession(1))
    assert (pair.engine.sessions, pair.engine.open_sessions) == ({1}, frozenset())
    pair.up(Tokens((row(request=3),), STATISTICS))  # it crossed the END: legal
    pair.up(SessionEnded(1, STATISTICS))
    assert pair.engine.sessions == pair.worker.sessions == frozenset()
    pair.down(Audit(1), Audit(2), Ping(1))
    pair.up(Audited(1, (), (), 8, 8, 0, 0), Audited(2, (), (), 8, 8, 0, 0), Pong(1, 1, Activity.IDLE, 0.0))
    pair.down(Shutdown())


BAD_ORDERS = {
    "session twice": [AddSession(1), AddSession(1)],
    "message without a session": [add_message()],
    "two requests": [AddSession(1), add_message(), add_message(request=2)],
    "an old request": [AddSession(1), add_message(request=0)],
    "stop without a session": [StopSession(1, 1)],
    "stop of another request": [AddSession(1), add_message(), StopSession(1, 2)],
    "end without a session": [EndSession(1)],
    "end twice": [AddSession(1), EndSession(1), EndSession(1)],
    "message after end": [AddSession(1), EndSession(1), add_message()],
    "configure twice": [Configure(WorkerConfig("m"))],
    "two pings": [Ping(1), Ping(2)],
}


@pytest.mark.parametrize("messages", BAD_ORDERS.values(), ids=BAD_ORDERS)
def test_what_we_may_not_send_changes_nothing(messages):
    pair = Pair()
    pair.down(*messages[:-1])
    for _ in range(2):
        with pytest.raises(LocalProtocolError):
            pair.engine.send(messages[-1])
    pair.down(AddSession(77))


@pytest.mark.parametrize("messages", BAD_ORDERS.values(), ids=BAD_ORDERS)
def test_what_the_peer_may_not_send_breaks_the_connection_for_good(messages):
    pair = Pair()
    pair.down(*messages[:-1])
    pair.worker.receive_data(unchecked(messages[-1]))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            pair.worker.next_message()


@pytest.mark.parametrize(
    "message",
    [
        Tokens((row(),), STATISTICS),
        Tokens((dataclasses.replace(row(2, 2), usage=None), row(2, 2)), STATISTICS),
        Tokens((dataclasses.replace(row(2, 2, last=True), usage=None),), STATISTICS),
        Tokens((dataclasses.replace(row(2, 2, last=True), finish_reason=FinishReason.ERROR),), STATISTICS),
        Tokens((dataclasses.replace(row(2, 2, last=True), finish_reason=FinishReason.TOOL_CALLS),), STATISTICS),
        Tokens((dataclasses.replace(row(2, 2), token_ids=token_ids([100])),), STATISTICS),
        Tokens((dataclasses.replace(row(2, 2), token_ids=token_ids([-1])),), STATISTICS),
        Tokens((dataclasses.replace(row(2, 2), token_ids=token_ids(), logprobs=None),), STATISTICS),
        Tokens((dataclasses.replace(row(2, 2), embedding=b"1234"),), STATISTICS),
        RequestFailed(1, 1, "", ""),
        SessionEnded(1, STATISTICS),
        SessionEnded(2, STATISTICS),
        Audited(1, (), (), 8, 8, 0, 0),
        Pong(1, 1, Activity.IDLE, 0.0),
        Loading(1, 2),
        Ready("llama", "cpu", "float32", 100, 64, 8, 16, "torch"),
    ],
    ids=lambda message: WIRE_NAMES[type(message)],
)
def test_what_the_worker_may_not_send(message):
    pair = Pair()
    pair.down(AddSession(2), add_message(2, 2))
    with pytest.raises(LocalProtocolError):
        pair.worker.send(message)
    pair.engine.receive_data(unchecked(message))
    with pytest.raises(RemoteProtocolError):
        pair.engine.next_message()


def test_the_wrong_way():
    pair = Pair()
    with pytest.raises(LocalProtocolError, match="SESSION_ENDED is not sent by the engine"):
        pair.engine.send(SessionEnded(1, STATISTICS))
    pair.engine.receive_data(pair.engine.send(AddSession(1)))
    with pytest.raises(RemoteProtocolError, match="ADD_SESSION is not sent by the worker"):
        pair.engine.next_message()


def test_before_ready_there_are_no_sessions():
    with pytest.raises(LocalProtocolError, match="new"):
        Connection(Role.ENGINE).send(AddSession(1))


def test_what_we_say_may_cross_fatal_and_nothing_follows_it():
    pair = Pair()
    pair.down(AddSession(1))
    pair.up(Fatal(FatalCode.INTERNAL, "bug", ""))
    pair.engine.send(EndSession(1))
    with pytest.raises(LocalProtocolError):
        pair.worker.send(SessionEnded(1, STATISTICS))


def test_a_frame_over_the_limit_is_refused_before_anything_changes():
    pair = Pair(max_model_len=4)
    too_long = add_message(ids=range(MIN_FRAME_LIMIT // 4))
    pair.down(AddSession(1))
    with pytest.raises(FrameTooLarge, match="ADD_MESSAGE"):
        pair.engine.send(too_long)
    pair.down(add_message())
    pair.worker.receive_data(LENGTH.pack(pair.worker.max_frame_bytes + 1))
    with pytest.raises(RemoteProtocolError, match="limit"):
        pair.worker.next_message()


def test_the_longest_prompt_with_the_most_images_fits_a_frame():
    """So an engine need not ask before it posts a request that it has admitted."""
    max_model_len, num_images = 8192, 4096
    tiles = max_model_len // num_images
    images = tuple(
        ImageInput(
            payload=number + 1,
            name=f"messages[{2**31}].content[{number}].image_url.url",
            digest=bytes(32),
            info=ImageInfo(ImageFormat.PNG, 16384, 16384, 8),
            num_bytes=2**40,
            tiles=token_ids(range(number * tiles, (number + 1) * tiles)),
        )
        for number in range(num_images)
    )
    pair = Pair(max_model_len=max_model_len)
    pair.down(AddSession(1))
    message = dataclasses.replace(add_message(ids=range(max_model_len - 1)), images=images)
    pair.worker.receive_data(pair.engine.send(message))
    assert pair.worker.next_message() == message


def test_a_long_context_has_longer_frames():
    pair = Pair(max_model_len=MIN_FRAME_LIMIT)
    pair.down(AddSession(1))
    pair.worker.receive_data(pair.engine.send(add_message(ids=range(MIN_FRAME_LIMIT - 1))))
    assert len(pair.worker.next_message().token_ids) == MIN_FRAME_LIMIT - 1


def test_an_audit_of_every_session_request_and_payload_fits_a_frame():
    greatest = range(2**63 - MAX_SESSIONS, 2**63)
    payloads = tuple(range(2**63 - 4096, 2**63))
    audited = Audited(2**63, tuple(greatest), tuple(greatest), 2**63, 2**63, 2**63, 2**63, payloads)
    assert len(encode(audited)) <= MIN_FRAME_LIMIT


def test_a_torn_frame_shows():
    pair = Pair()
    pair.worker.receive_data(pair.engine.send(AddSession(1))[:-1])
    assert pair.worker.next_message() is None
    assert pair.worker.has_partial_frame
