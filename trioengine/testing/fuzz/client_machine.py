"""The client library, `connect`, under hypothesis: its users, and the connections between it and the server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import trio
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.core.errors import EngineError, SessionBusy
from trioengine.core.sampling_params import SamplingParams
from trioengine.serve.realtime.outbox import SHOWN
from trioengine.serve.server import ABORT_TIMEOUT
from trioengine.testing.fuzz import client_oracles, inside, inside_client, inside_server
from trioengine.testing.fuzz.callers import Style, latest_first
from trioengine.testing.fuzz.client_callers import (
    HISTORIES,
    Line,
    OneShot,
    RemoteHolder,
    check_error,
)
from trioengine.testing.fuzz.client_environment import BUFFERED, MOST
from trioengine.testing.fuzz.client_tools_machine import ClientToolsMachine
from trioengine.testing.fuzz.conversations import FILES, content_of, messages_of
from trioengine.testing.fuzz.environment import Switch
from trioengine.testing.fuzz.faults import Harm, Life
from trioengine.testing.fuzz.oracles import check_worker
from trioengine.testing.fuzz.peers import WHICH
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.promptness import Wait
from trioengine.testing.memory_peer import RemotePeer
from trioengine.testing.simulated_peer import PeerState

PROMPTS = ("a", "to be", "be or not be or not be or", "<|im_end|>", "")
WAIT = st.sampled_from((None, True, False))
TIMEOUT = st.sampled_from((None, None, 0.5, 8.0))
ROUNDS = st.sampled_from((0, 0, 0, 6, 9, 14, 20))
UNPINGED, UNANSWERED = 19.0, 9.0  # seconds without bytes in which a connection, and a handshake, is not lost
SQUEEZED = 3_000  # bytes, with which a conversation grows no more
ONE_SHOT_STOPS = ("abort a one-shot", "cancel a one-shot")
STOPS = ("abort", "cancel", "go on", "abort by id", "abort by label", *ONE_SHOT_STOPS)


class ClientMachine(ClientToolsMachine):
    """Rules are actions of programs that use the library, and faults of their connections."""

    @recorded(
        initialize,
        ready=st.sampled_from((True, True, True, False)),
        sessions=st.sampled_from((1, 1, 2)),
        turns=st.sampled_from((0, 0, 1)),
        history=st.sampled_from((0, 0, 3)),
    )
    def begin(self, ready: bool, sessions: int, turns: int, history: int) -> None:
        """Mostly from a server that is ready, with sessions that have talked."""
        if ready:
            self._settle()
        else:
            self.faults.begin(Harm.WORKERS)
        self._begin_user()
        for _ in range(sessions):
            self._open(True, None, HISTORIES[history])
        if ready:
            self._settle()
        for session in range(sessions if ready and turns else 0):
            self._read(session, Style.ALL, SamplingParams(max_tokens=1))
            self._settle()

    # ---- programs -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.num_callers < MOST)
    @recorded(
        wait=WAIT,
        timeout=TIMEOUT,
        history=st.sampled_from((0, 0, 1, 2, 3)),
        rounds=ROUNDS,
        gives_up=st.sampled_from((False, False, True)),
    )
    def open(self, wait: bool | None, timeout: float | None, history: int, rounds: int, gives_up: bool) -> None:
        """A session; of a new user if none is left."""
        self._begin_user()
        self._open(wait, timeout, HISTORIES[history])
        self._flow(rounds)
        if gives_up and self.holders[-1].give_up():
            self.coverage.saw("a session is given up while its history is sent")

    @precondition(lambda self: self.open_holders)
    @recorded(which=WHICH, max_tokens=st.sampled_from((1, 2, 5, 40)), reads=st.sampled_from((True, True, False)))
    def ask(self, which: int, max_tokens: int, reads: bool) -> None:
        """A request, or another session where all are lost."""
        self._read(which, Style.ALL if reads else Style.STALLED, SamplingParams(max_tokens=max_tokens))

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        prompt=st.sampled_from(PROMPTS),
        stop=st.sampled_from(("", "e", "a b")),
        min_tokens=st.sampled_from((0, 0, 9)),
        style=st.sampled_from([style.value for style in (*Style, Style.FIRST)]),
        keep_partial=st.booleans(),
        timeout=TIMEOUT,
        wait=WAIT,
        rounds=ROUNDS,
    )
    def ask_so(
        self,
        which: int,
        prompt: str,
        stop: str,
        min_tokens: int,
        style: str,
        keep_partial: bool,
        timeout: float | None,
        wait: bool | None,
        rounds: int,
    ) -> None:
        """A request with other parameters; how far it gets is given."""
        params = SamplingParams(max_tokens=20, stop=(stop,) if stop else (), min_tokens=min_tokens)
        self._read(which, Style(style), params, prompt=prompt, keep_partial=keep_partial, timeout=timeout, wait=wait)
        self._flow(rounds)

    @precondition(lambda self: self.idle_holders)
    @recorded(which=WHICH, rounds=ROUNDS)
    def ask_for_too_long(self, which: int, rounds: int) -> None:
        """The time of a request is over after so many rounds, unless its answer is there by then."""
        self._read(which, Style.ALL, SamplingParams(max_tokens=40), timeout=0.5)
        self._flow(rounds)
        self._jump(0.5)

    @precondition(lambda self: self.shows and self.open_holders)
    @recorded(which=WHICH, media=st.sampled_from(FILES), prompt=st.sampled_from(("", "a")), rounds=ROUNDS)
    def show(self, which: int, media: str, prompt: str, rounds: int) -> None:
        """A request with pictures."""
        self._read(which, Style.ALL, SamplingParams(max_tokens=3), prompt=prompt, media=media)
        self._flow(rounds)

    @precondition(lambda self: self.num_callers < MOST)
    @recorded(wait=WAIT, timeout=TIMEOUT, max_tokens=st.sampled_from((1, 20)), media=st.sampled_from(("", *FILES)))
    def ask_once(self, wait: bool | None, timeout: float | None, max_tokens: int, media: str) -> None:
        """`client.generate`."""
        user = self._begin_user()
        label = f"one-shot-{len(self.one_shots) + 1}"
        params = SamplingParams(max_tokens=max_tokens)
        content = content_of(media if self.shows else "", "hi")
        call = OneShot(Life(self.faults), self.faults, Line(user), content, params, wait, timeout, label)
        self.one_shots.append(call)
        self.loop.start_soon(call.run, name=label)

    @precondition(lambda self: self.readers or self.one_shots)
    @recorded(which=WHICH, what=st.sampled_from(STOPS))
    def stop_reading(self, which: int, what: str) -> None:
        """Also of a request that is over; the latest is the first to be chosen."""
        if what in ONE_SHOT_STOPS or not self.readers:
            self._stop_one_shot(which, what)
        else:
            self._stop(pick(latest_first(self.readers), which), what)

    @precondition(lambda self: self.holders)
    @recorded(which=WHICH, what=st.sampled_from(("leave", "cancel", "end")))
    def leave(self, which: int, what: str) -> None:
        """Also a session that has ended."""
        holder = pick(latest_first(self.holders), which)
        self.coverage.saw(f"{what} a session {'with' if holder.is_busy else 'without'} a request")
        match what:
            case "leave":
                holder.leave.set()
            case "cancel":
                holder.scope.cancel()
            case "end":
                holder.end()

    @precondition(lambda self: self.open_holders)
    @recorded(which=WHICH, turns=st.sampled_from((0, 1, 3)))
    def replace_history(self, which: int, turns: int) -> None:
        """Refused while the session has a request without an outcome."""
        holder = pick(self.open_holders, which)
        requests = [reader.generation for reader in holder.readers if reader.generation is not None]
        undecided = [reader for reader in holder.readers if not (reader.over or reader.has_outcome)]
        last = max(map(inside_client.response_id, requests), default="")
        assert holder.session is not None, "it is open"
        try:
            holder.session.replace_history(messages_of(HISTORIES[turns]))
        except SessionBusy:
            assert undecided, f"it has no request, and is busy: {holder.session}"
            self.coverage.saw("a history is replaced in the middle of a request")
        except EngineError as exc:
            check_error(exc, holder.line, holder.life, self.faults, wait=False, deadline=math.inf)
        else:
            is_busy = any(reader.entered for reader in undecided)
            assert not is_busy, f"the history of {holder.session} is replaced under its request"
            self.coverage.saw("a history is replaced")
            holder.histories.append((last, HISTORIES[turns]))

    @precondition(lambda self: self.user is not None)
    @recorded(how=st.sampled_from(("leave", "raise", "cancel", "dislike")))
    def leave_client(self, how: str) -> None:
        """The scope of `connect` is left, with all its sessions; or will be, as its `on_state` raises from now on."""
        assert self.user is not None, "there is one"
        self.coverage.saw(f"{how} a client with {'requests' if self.running_readers else 'no requests'}")
        self.user.go(how)

    # ---- connections ----------------------------------------------------------------------------------------------

    @recorded(how=st.sampled_from(("refused", "silent")))
    def fail_dial(self, how: str) -> None:
        """The next connection is refused, or is never there."""
        self.dials = [how]

    @precondition(lambda self: any(client.is_active for client in self.clients) or self.engine.power.asleep)
    @recorded(how=st.sampled_from(("keep", "wake", "wake", "wake", "abort", "wait", "weights", "update")))
    def switch(self, how: Switch | Literal["update"]) -> None:
        """The operator puts the engine to sleep, wakes it, or loads the weights that it has, as another version."""
        self._switch_or_update(how)

    @precondition(lambda self: self.clients)
    @recorded(num_bytes=st.sampled_from((SQUEEZED, 10_000, BUFFERED)))
    def squeeze(self, num_bytes: int) -> None:
        """The server has room for so many bytes of its clients."""
        self.is_squeezed = num_bytes < self.max_buffered_bytes
        inside_server.set_max_buffered_bytes(self.server, num_bytes)

    def _gone(self, client: RemotePeer, how: str) -> None:
        client.is_harmed = True
        if how in ("stall", "vanish"):
            client.silent_since = min(client.silent_since, trio.current_time())
        elif how == "read again":
            client.silent_since = math.inf

    # ---- overrides --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        super()._look()
        for caller in self.callers:
            is_open = isinstance(caller, RemoteHolder) and caller.session is not None
            bound = ABORT_TIMEOUT if self.is_closing else UNPINGED if is_open else UNANSWERED
            if self.waited >= bound:
                caller.line.harm()

    def _waits(self) -> Iterator[Wait]:
        yield from super()._waits()
        if not self.is_squeezed and self.is_well and not self.payloads_wait:
            yield from client_oracles.waits_of_readers(self.running_readers, self.engine)

    def _check_blocked(self) -> None:
        super()._check_blocked()
        for caller in self.callers:
            caller.line.listen()
            if self.is_cutting:
                caller.line.harm()
        if not self.payloads_wait:
            client_oracles.check_stopped(self.holders, inside.sessions(self.engine))
        for reader in self.readers:
            client_oracles.check_prompt(reader)
        for holder in self.holders:
            client_oracles.check_left(holder)
        for call in self.one_shots:
            client_oracles.check_call(call)
        for user in self.users:
            client_oracles.check_user(user)

    def _check(self) -> None:
        super()._check()
        for reader in self.readers:
            if reader.over and not reader.checked:
                client_oracles.check_reader(reader, self.faults)
                reader.checked = True
                client_oracles.check_usage(reader, self.requests.whole_answers)
        for call in self.one_shots:
            if call.over and not call.checked:
                client_oracles.check_one_shot(call, self.faults)
                call.checked = True
        client_oracles.check_names(self.holders, self.server.model_name)
        for holder in self.holders:
            client_oracles.check_holder(holder)
        if self.is_well:
            check_worker(self.engine, self._worker(), inside.sessions(self.engine))
            self._check_rest()

    def _check_rest(self) -> None:
        """At rest, with a worker that is well: all that can go on does, and callers that went have left nothing."""
        may_wait = self.engine.power.asleep or inside.is_change_pending(self.engine)
        client_oracles.check_woken(self.running_readers if not may_wait else ())
        client_oracles.check_gone(self.callers)
        items = {each.id: inside_server.outlines(each) for each in self.watch.connections}
        for holder in self.holders:
            client_oracles.check_nothing_left(holder)
            client_oracles.check_same(holder, items)
            client_oracles.check_state(holder, SHOWN[self.engine.state])

    def _let_go(self) -> None:
        self.is_squeezed = False
        inside_server.set_max_buffered_bytes(self.server, self.max_buffered_bytes)
        for peer in self.clients:
            if peer.peer_state is PeerState.STALLED:
                peer.peer_state, peer.silent_since = PeerState.WELL, math.inf
        self._wake_up()
        for reader in self.readers:
            reader.go_on.set()
        self._run_out(lambda: not self.running_readers, "readers wait forever")
        for holder in self.holders:
            holder.leave.set()
        self._run_out(lambda: not self.num_callers, "callers wait forever")
        for user in self.users:
            user.go("leave")
        self._run_out(lambda: all(user.over for user in self.users), "connect() is never left")
        for user in self.users:
            left = inside_client.left_over(user.client) if user.client is not None else {}
            assert not any(left.values()), f"all have gone, and left are {left}"
        self._check()
        super()._let_go()
