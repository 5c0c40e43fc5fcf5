"""Payloads: the bytes of images, from the ADD_MESSAGE that announces them to PAYLOAD_CONSUMED.

They travel beside the frames, so that a payload may come before its announcement is handled. Each is consumed once:
its source is closed, and then it is reported.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trioengine.core.errors import InvariantError, RemoteProtocolError
from trioengine.core.messages import ImageInput


class PayloadSource(Protocol):
    """The bytes of a payload; a real one is a descriptor."""

    @property
    def num_bytes(self) -> int: ...

    def open(self) -> AbstractContextManager[memoryview]:
        """The bytes, read only, while the context lasts. In any thread, before `close`."""
        ...

    def close(self) -> None:
        """Give the bytes back; once."""
        ...


@dataclass(frozen=True, slots=True)
class PayloadArrived:
    """An event of the worker: a payload has come."""

    payload: int
    source: PayloadSource


class Payload(NamedTuple):
    """A payload that was announced, and has come."""

    id: int
    source: PayloadSource


class Payloads:
    """All payloads that were announced or have come, and are not consumed."""

    def __init__(self) -> None:
        self._latest = 0  # the last one that was announced: they ascend
        self._awaited: dict[int, ImageInput] = {}  # announced, and not here
        self._early: dict[int, PayloadSource] = {}  # here, and not announced
        self._here: set[int] = set()  # both
        self._consumed: list[int] = []  # and not reported

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Those that were announced and are not consumed, ascending."""
        return tuple(sorted(self._here.union(self._awaited)))

    @property
    def num_held(self) -> int:
        """Those that are here, announced or not."""
        return len(self._here) + len(self._early)

    def announce(self, image: ImageInput) -> Payload | None:
        """The payload, if it has come already. RemoteProtocolError: it has another length."""
        self._latest = image.payload
        self._awaited[image.payload] = image
        source = self._early.pop(image.payload, None)
        return None if source is None else self._take(image, source)

    def arrive(self, payload: int, source: PayloadSource) -> tuple[ImageInput, Payload] | None:
        """The image that a payload is of; None: its announcement is still to come.

        RemoteProtocolError, and the source is closed: the payload has come before, or has another length.
        """
        image = self._awaited.get(payload)
        if image is not None:
            return image, self._take(image, source)
        if payload <= self._latest or payload in self._early:
            source.close()
            raise RemoteProtocolError(f"payload {payload} has come already")
        self._early[payload] = source
        return None

    def consume(self, payload: Payload) -> None:
        """Close its source; `take_consumed` reports it."""
        self._here.remove(payload.id)
        payload.source.close()
        self._consumed.append(payload.id)

    def take_consumed(self) -> list[int]:
        """Those that were consumed since the last call, in order."""
        consumed, self._consumed = self._consumed, []
        return consumed

    def check_integrity(self, held: list[int]) -> None:
        """Raise InvariantError unless `held` are those that were announced and are here, each once."""
        if sorted(held) != sorted(self._here):
            raise InvariantError(f"payloads {sorted(self._here)} are here, and images hold {sorted(held)}")

    def _take(self, image: ImageInput, source: PayloadSource) -> Payload:
        if source.num_bytes != image.num_bytes:
            source.close()
            raise RemoteProtocolError(
                f"payload {image.payload} has {source.num_bytes} bytes, and ADD_MESSAGE announced {image.num_bytes}"
            )
        del self._awaited[image.payload]
        self._here.add(image.payload)
        return Payload(image.payload, source)
