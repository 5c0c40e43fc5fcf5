"""Users of the client library in fuzzed programs, their sessions and requests, and the dials to the server."""

from __future__ import annotations

from typing import cast

import trio

from trioengine.actors.engine import Engine
from trioengine.core.errors import ConnectionLost
from trioengine.core.sampling_params import Overflow, SamplingParams
from trioengine.testing.fuzz import client_oracles, inside_client, inside_payloads
from trioengine.testing.fuzz.callers import Style
from trioengine.testing.fuzz.client_callers import LINE, Line, OneShot, RemoteHolder, RemoteReader, User, expect_aborts
from trioengine.testing.fuzz.conversations import Turn, messages_of
from trioengine.testing.fuzz.faults import Life
from trioengine.testing.fuzz.program import pick
from trioengine.testing.fuzz.served import ServedEnvironment
from trioengine.testing.fuzz.tools import Offered
from trioengine.testing.memory_peer import RemotePeer

BUFFERED = 1_000_000  # bytes: enough, but for the rule `squeeze`
MOST = 4  # sessions and one-shots at once
LABELS = ("even", "odd")  # of requests


class ClientEnvironment(ServedEnvironment[RemotePeer]):
    """The rules are in the machines built on it."""

    max_buffered_bytes = max_buffered_bytes_with_pictures = BUFFERED
    horizon = 150.0  # past the timeouts of connecting, of pings, of sending and of closing, one after the other

    def __init__(self) -> None:
        super().__init__()
        self.users: list[User] = []
        self.holders: list[RemoteHolder] = []
        self.readers: list[RemoteReader] = []
        self.one_shots: list[OneShot] = []
        self.dials: list[str] = []  # the next ones fail in these ways
        self.is_squeezed = False  # the server, by a rule

    async def _dial(self) -> trio.abc.Stream:
        line = LINE.get()
        await trio.lowlevel.checkpoint()
        if self.dials:
            line.is_undialed = True
            if self.dials.pop() == "silent":
                await trio.sleep_forever()
            raise ConnectionLost("made not to connect")
        peer = line.dialed()
        self.clients = [client for client in self.clients if not client.is_over]
        self._join(peer)
        return peer.client_stream

    # ---- actions ----------------------------------------------------------------------------------------------------

    def _begin_user(self) -> User:
        """Return the present user; start another one if none is left."""
        if (user := self.user) is None:
            user = User(Life(self.faults), self._dial)
            self.users.append(user)
            self.loop.start_soon(user.run, name=f"user-{len(self.users)}")
            self.loop.tick()
        return user

    def _open(self, wait: bool | None, timeout: float | None, history: tuple[Turn, ...]) -> None:
        overflow: Overflow = "drop_oldest_turns" if len(self.holders) % 2 else "refuse"
        user = self._begin_user()
        holder = RemoteHolder(
            Life(self.faults),
            cast("Engine", user.client),  # has the same interface
            wait,
            timeout,
            overflow,
            history,
            messages_of(history),
            faults=self.faults,
            line=Line(user),
            histories=[("", history)],
        )
        self.holders.append(holder)
        self.loop.start_soon(holder.run, name=f"holder-{len(self.holders)}")

    def _read(
        self,
        which: int,
        style: Style,
        params: SamplingParams,
        *,
        prompt: str = "to be",
        keep_partial: bool = False,
        timeout: float | None = None,
        wait: bool | None = True,
        media: str = "",
        tools: Offered | None = None,
        results: tuple[Turn, ...] = (),
        holder: RemoteHolder | None = None,
    ) -> RemoteReader | None:
        """A request, or another session where all are lost."""
        able_first = sorted(self.open_holders, key=lambda each: (not each.line.is_well, each.is_busy))
        holder = holder or pick(able_first, which)
        if not which and not holder.line.is_well and self.num_callers < MOST:
            self._open(True, None, ())
            return None
        label = pick(LABELS, len(self.readers))
        reader = RemoteReader(
            *(Life(self.faults), holder, prompt, params, style, keep_partial, timeout, wait, media, label),
            tools=tools,
            results=results,
        )
        holder.readers.append(reader)
        self.readers.append(reader)
        self.loop.start_soon(reader.run, name=f"reader-{len(self.readers)}")
        return reader

    def _stop(self, reader: RemoteReader, what: str) -> None:
        generation, client = reader.generation, client_oracles.reader_holder(reader).line.user.client
        assert client is not None, "there is one"
        if what == "cancel":
            reader.scope.cancel()
        elif what == "go on":
            reader.go_on.set()
        elif what == "abort by label":
            ended = [each for each in self.readers if each.label == reader.label and each.is_abortable(client)]
            expect_aborts(client, reader.label, ended)
        elif generation is not None and inside_client.has_id(generation) and (reader.entered or not reader.over):
            due = [reader] if reader.is_abortable(client) else []
            if what == "abort":
                reader.aborted, aborted = True, generation.abort()
                assert aborted == bool(due), f"abort() returned {aborted} for {generation}"
                due = []
            expect_aborts(client, generation.request_id, due)

    def _stop_one_shot(self, which: int, what: str) -> None:
        running = [call for call in self.one_shots if not call.over]
        if running:
            call = pick(running, which)
            call.abort() if what == "abort a one-shot" else call.scope.cancel()

    # ---- queries ----------------------------------------------------------------------------------------------------

    @property
    def user(self) -> User | None:
        """The latest one, unless it leaves."""
        return self.users[-1] if self.users and not self.users[-1].is_leaving else None

    @property
    def callers(self) -> list[RemoteHolder | OneShot]:
        """All with connections of their own."""
        return [*self.holders, *self.one_shots]

    @property
    def num_callers(self) -> int:
        """Sessions and one-shots that are not over."""
        return sum(not caller.over for caller in self.callers)

    @property
    def open_holders(self) -> list[RemoteHolder]:
        return [holder for holder in self.holders if holder.is_open]

    @property
    def running_readers(self) -> list[RemoteReader]:
        return [reader for reader in self.readers if not reader.over]

    @property
    def payloads_wait(self) -> bool:
        """Whether an event waits for room for its images."""
        return len(inside_payloads.budget(self.engine).line) > 0

    @property
    def in_use(self) -> bool:
        return bool(self.users)
