"""Frames on the pipe: a u32 little-endian length, then a payload; they come in any portions."""

from __future__ import annotations

from trioengine.core.codec import LENGTH
from trioengine.core.errors import RemoteProtocolError


class FrameBuffer:
    """Bytes as they came from the pipe, and the whole frames at their beginning."""

    def __init__(self) -> None:
        self._data = bytearray()

    def __bool__(self) -> bool:
        """Whether bytes are left."""
        return bool(self._data)

    def add(self, data: bytes | bytearray) -> None:
        self._data += data

    def next_payload(self, max_bytes: int) -> bytes | None:
        """The next frame's, or None when more bytes are needed. RemoteProtocolError if it claims more than that."""
        if len(self._data) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._data)
        if length > max_bytes:
            raise RemoteProtocolError(f"a frame claims {length} bytes, the limit is {max_bytes}")
        if len(self._data) < LENGTH.size + length:
            return None
        payload = bytes(memoryview(self._data)[LENGTH.size : LENGTH.size + length])
        del self._data[: LENGTH.size + length]
        return payload
