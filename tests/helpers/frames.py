"""The bytes that a client sends on a raw stream: requests, the handshake, and events in WebSocket frames."""

import json


def request(path, method="GET", host="localhost", more="", body=b""):
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{length}{more}\r\n".encode() + body


HEALTH = request("/health")
HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MASK = b"\0\0\0\0"


def frame(payload, opcode=1):
    """A WebSocket frame from a client; the mask changes nothing."""
    length = len(payload)
    if length < 126:
        size = bytes([0x80 | length])
    else:
        size = b"\xfe" + length.to_bytes(2) if length < 1 << 16 else b"\xff" + length.to_bytes(8)
    return bytes([0x80 | opcode]) + size + MASK + payload


def event(name, **fields):
    return frame(json.dumps({"type": name, **fields}).encode())


SAY = event(
    "conversation.item.create",
    item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
)


async def read_until(stream, text):
    data = b""
    while text not in data:
        received = await stream.receive_some()
        assert received, f"closed without {text!r}"
        data += received
    return data
