"""The HTTP server under hypothesis: clients and operators, and the limits and timeouts of the server."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.actors.power_change import PowerState
from trioengine.core.lifecycle import Phase
from trioengine.serve.config import ServeConfig
from trioengine.serve.limits import InFlight
from trioengine.testing.fuzz import http_probes as probes
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.choices_environment import ChoicesEnvironment
from trioengine.testing.fuzz.conversations import FILES, content_of
from trioengine.testing.fuzz.environment import ORDERS
from trioengine.testing.fuzz.faults import Harm, Life
from trioengine.testing.fuzz.http_books import ADMIN_KEY, KEYS, HttpBooks, Request, Tally
from trioengine.testing.fuzz.http_client import FRAMINGS, HttpClient
from trioengine.testing.fuzz.http_exchange import Ask
from trioengine.testing.fuzz.http_ids import AbortJudge
from trioengine.testing.fuzz.http_judge import BEFORE_THE_HANDLER
from trioengine.testing.fuzz.http_probes import PROBES, StateJudge
from trioengine.testing.fuzz.http_raw import RAW
from trioengine.testing.fuzz.oracles import check_worker
from trioengine.testing.fuzz.peers import WHICH
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.shapes import Head, check_problem, has_fields
from trioengine.testing.fuzz.world import LIMITS
from trioengine.testing.simulated_peer import PeerState

SWITCHES = (
    *("/sleep?mode=keep", "/sleep?level=2&mode=keep", "/sleep", "/sleep?mode=wait", "/sleep?mode=wait&timeout=0.5"),
    *("/wake_up", "/wake_up", "/wake_up?tags=weights", "/wakeup?tags=kv_cache", "/wake_up?reload=false"),
)
PROMPTS = ("a", "be", "<|im_end|>", "be" * 60)
TOKENS = st.sampled_from((1, 3, 20))
IDS = ("chosen-0", "chosen-1", "own")


class HttpMachine(ChoicesEnvironment):
    """Rules are actions of clients and of the operator of the server."""

    horizon = 120.0  # past the timeouts, one after the other
    max_buffered_bytes = 440  # one or two bodies
    max_buffered_bytes_with_pictures = 990
    serve_config: ClassVar[dict[str, Any]] = {
        "api_key": KEYS,
        "admin_key": (ADMIN_KEY,),
        "max_sessions_per_key": 3,
        "max_buffered_bytes_per_key": max_buffered_bytes,
        "max_body_size": 1400,
        "handshake_timeout": 5.0,
        "body_timeout": 9.0,
        "idle_timeout": 16.0,
        "send_timeout": 6.0,
    }

    def __init__(self) -> None:
        super().__init__()
        self.books = HttpBooks(self.server.config, self.engine.config, self.server.model_name)
        self.engine.observers.append(self.books)
        self.state = StateJudge(self.faults, self._steady_state)
        self._switches: list[Life] = []  # of operators' requests, until they are answered
        self._loading = Life(self.faults)  # until the first worker is ready
        self.aborts = AbortJudge(self.engine, self.clients, self.loop.crashes)
        self._taps.enter_context(inside.replaced(InFlight, "abort", self.aborts.tap))

    def make_config(self) -> ServeConfig:
        config = super().make_config()
        return replace(config, max_sessions_per_key=1) if self.variant == 1 else config

    @recorded(initialize, ready=st.sampled_from((True, True, True, False)), clients=st.integers(1, 2))
    def begin(self, ready: bool, clients: int) -> None:
        """Mostly from a server that is ready."""
        if ready:
            self._settle()
        for key in range(clients):
            self._connect(key)

    @precondition(lambda self: self.may_connect)
    @recorded(key=st.sampled_from((0, 1, 1, 2)))
    def connect(self, key: int) -> None:
        self._connect(key)

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        prompt=st.sampled_from(PROMPTS),
        max_tokens=TOKENS,
        streams=st.booleans(),
        how=st.sampled_from(FRAMINGS),
        rounds=st.sampled_from((0, 0, 6, 9, 12, 15, 20)),
    )
    def ask(self, which: int, prompt: str, max_tokens: int, streams: bool, how: str, rounds: int) -> None:
        """A request, maybe while one is answered; how far it gets is given."""
        self._ask(which, Ask(prompt, max_tokens, streams), rounds, how)

    @precondition(lambda self: any(client.has_unsent for client in self.clients))
    @recorded(which=WHICH)
    def send_rest(self, which: int) -> None:
        """A client sends the rest of a request."""
        pick([client for client in self.targets if client.has_unsent], which).send_rest()

    @precondition(lambda self: self.has_speakers)
    @recorded(which=WHICH, name=st.sampled_from((*PROBES, *RAW)))
    def probe(self, which: int, name: str) -> None:
        """A request that is answered at once, or refused because a part of it is wrong."""
        if name in RAW:
            raw = RAW[name]
            pick(self.speakers, which).send_raw(raw.data, raw.judge, is_last=raw.closes)
            return
        probe = PROBES[name]
        judge = probe.judge if self.served else probe.judge_early
        pick(self.speakers, which).request(probe.request, judge)

    @precondition(lambda self: self.has_speakers)
    @recorded(which=WHICH, what=st.sampled_from(("metrics", "metrics", "health", "ready", "sleeping", "invariants")))
    def observe(self, which: int, what: str) -> None:
        """A request for the state of the engine."""
        client, state = pick(self.speakers, which), self.state
        match what:
            case "health":
                client.request(probes.HEALTH, state.health)
            case "ready":
                client.request(probes.READY, state.ready)
            case "sleeping":
                client.request(probes.SLEEPING, state.sleeping)
            case "metrics":
                client.request(probes.SCRAPE, state.scraping())
            case "invariants":
                client.request(probes.INVARIANTS, state.invariants, is_prompt=False)

    @precondition(lambda self: self.shows and self.has_speakers)
    @recorded(
        which=WHICH,
        media=st.sampled_from(FILES),
        prompt=st.sampled_from(("a", "be")),
        max_tokens=TOKENS,
        streams=st.booleans(),
        rounds=st.sampled_from((0, 0, 6, 9, 12, 15, 20)),
    )
    def show(self, which: int, media: str, prompt: str, max_tokens: int, streams: bool, rounds: int) -> None:
        """The same with pictures."""
        self._ask(which, Ask(content_of(media, prompt), max_tokens, streams), rounds)

    @precondition(lambda self: any(client.is_active for client in self.clients))
    @recorded(
        which=WHICH,
        rounds=st.sampled_from((12, 20, 28)),
        count=st.integers(1, 600),
        passes=st.integers(1, 2),
        order=st.integers(0, ORDERS - 1),
    )
    def pause(self, which: int, rounds: int, count: int, passes: int, order: int) -> None:
        """A client reads nothing for a while, and reads again in the pass in which a row comes from the worker."""
        readers = [client for client in self.targets if client.is_active and client.is_heard]
        if not readers:
            return
        client = pick(readers, which)
        client.peer_state = PeerState.STALLED
        self._flow(rounds)
        if self.worker is not None:
            self.worker.turn()
            self.worker.deliver()
        if client.peer_state is not PeerState.STALLED:  # the server has broken it off
            return
        client.peer_state = PeerState.WELL
        client.carry(to_server=0, to_client=count)
        self.loop.tick(passes, order)

    @precondition(lambda self: self.may_connect)
    @recorded(
        id=st.sampled_from(IDS),
        streams=st.sampled_from((True, True, False)),
        rounds=st.sampled_from((12, 18, 24, 30)),
        leaves=st.booleans(),
        aborts=st.booleans(),
    )
    def ask_alike(self, id: str, streams: bool, rounds: int, leaves: bool, aborts: bool) -> None:
        """Clients ask under one id for a long and a short answer; one may leave, and an operator may abort the rest."""
        for key in range(2 - len(self.idle)):
            if self.may_connect:
                self._connect(key)
        asking = self.idle[:2]
        for client, max_tokens in zip(asking, (20, 3), strict=False):
            client.ask(Ask("be", max_tokens, streams, request_id=id))
        self._flow(rounds)
        if leaves and asking:  # none can connect where the server closes
            asking[-1].hang_up()
        if aborts:
            self._abort({"request_id": id}, 0)
            self._flow(9)

    @precondition(lambda self: bool(self.speakers and self.aborts.known_ids()))
    @recorded(which=WHICH, request=st.sampled_from((0, 0, 1, 2, -1)), rounds=st.sampled_from((0, 6, 9)))
    def abort(self, which: int, request: int, rounds: int) -> None:
        """An operator ends the requests of an id, or all; they may be over when that arrives."""
        fields = {"abort_all": True} if request < 0 else {"request_id": pick(self.aborts.known_ids(), request)}
        self._abort(fields, which)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(which=WHICH, how=st.sampled_from(SWITCHES), rounds=st.sampled_from((0, 0, 6, 12)))
    def switch(self, which: int, how: str, rounds: int) -> None:
        """An operator puts the engine to sleep, or wakes it, and may not wait for the answer."""
        self._excuse_sleep()
        change = Life(self.faults)
        self._switches.append(change)
        judge = functools.partial(self._judge_switch, how, change)
        pick(self.idle or self.speakers, which).request(_operation(how, {}), judge, is_prompt=False)
        if rounds:
            self._flow(rounds)

    @property
    def idle(self) -> list[HttpClient]:
        """The clients that can send, and wait for nothing."""
        return [client for client in self.speakers if not client.is_active]

    def _abort(self, fields: dict[str, Any], which: int) -> None:
        """Send an abort, on a connection that is idle if there may be one."""
        if not self.idle and self.may_connect:
            self._connect(0)
        able = self.idle or self.speakers
        if able:
            pick(able, which).request(_operation("/abort_request", fields), self._judge_abort)

    # ---- overrides --------------------------------------------------------------------------------------------------

    def act(self, rule: Callable[[], None]) -> None:
        super().act(rule)
        if self.served and math.isinf(self._loading.ended):
            self._loading.end()

    def _connect(self, key: int) -> None:
        clock = self.loop.clock.current_time
        self._join(HttpClient(self.books, KEYS[key], LIMITS.max_model_len, self.faults, clock))

    def _close_within(self, seconds: float) -> None:
        super()._close_within(seconds)
        self.books.is_closing = True

    def _make_room(self) -> None:
        super()._make_room()
        self.books.max_bytes = self.max_buffered_bytes_with_pictures

    def _judge_abort(self, head: Head, body: bytes, life: Life) -> bool:
        """Each answer has the number of one call."""
        if head.status != 200:
            return False
        found = has_fields(json.loads(body), ("aborted",), "the answer to an abort")
        numbers = self.watch.num_aborted
        numbers[found["aborted"]] -= 1
        assert min(numbers.values()) >= 0, f"an abort is answered by {found}"
        return True

    def _steady_state(self, life: Life, change: Life | None = None) -> PowerState | None:
        """The engine's state, unless something may have changed it since this life began, other than this change."""
        is_steady = all(each is change or each.ended < life.began for each in self._switches)
        was_loading = self._loading.ended > life.began  # a client may read the answer later
        is_troubled = was_loading or self.faults.hit(life, Harm.CLOSING, Harm.WORKERS)
        return None if is_troubled or not is_steady else self.engine.power

    def _judge_switch(self, target: str, change: Life, head: Head, body: bytes, life: Life) -> bool:
        change.end()
        if head.status == 200:
            found = json.loads(body)
            probes.check_state(found)
            if self._steady_state(life, change) is not None:
                probes.check_changed(found, target)
            return True
        error = check_problem(json.loads(body)["error"], head)
        if error["code"] in BEFORE_THE_HANDLER:
            return False
        is_loading = error["message"] == "the engine is loading"
        sleeps_deeper = error["message"].startswith("it sleeps at level 2")
        troubled = self.faults.hit(life, Harm.CLOSING, Harm.WORKERS)
        assert error["code"] == "transition_failed" or self.faults.closing, f"{target}: {error}"
        assert is_loading or sleeps_deeper or troubled, f"{target} is refused by {error}"
        return True

    @property
    def _is_sleep_over(self) -> bool:
        return super()._is_sleep_over and not any(client.is_active for client in self.clients)

    def _check_blocked(self) -> None:
        super()._check_blocked()
        self.books.rest()
        phases = Phase.PREPARING, Phase.RUNNING
        going = [session for session in inside.sessions(self.engine) if inside.phase(session) in phases]
        asking = [client for client in self.clients if client.peer_state is not PeerState.GONE and client.is_active]
        self.requests.check_choices(going)
        most = sum(max(exchange.num_choices for exchange in client.exchanges) for client in asking)
        assert len(going) <= most, f"{going} go on for {len(asking)} clients"

    def _check(self) -> None:
        super()._check()
        if self._is_sleep_over:
            self._switches.clear()
        if self.is_well:
            for client in self.clients:
                client.check_kept()
            check_worker(self.engine, self._worker(), inside.sessions(self.engine))
            stuck = [client for client in self.clients if client.waits_for_answer]
            assert len(stuck) <= self._num_asleep, f"requests of {stuck} are never answered"

    def _all_gone(self) -> None:
        """A last scrape counts each request of the program once."""
        if not self.is_well or self.faults.closing:
            return
        self._connect(0)
        client = self.clients[-1]
        client.request(probes.SCRAPE, self.state.scraping())
        self._settle()
        assert not client.is_active, "the last scrape is not answered"
        assert self.state.last is not None, "it was judged"
        is_calm = not self.faults.hit(self.server_call.life, *Harm)
        Tally.of(self.requests.generations).check(self.state.last, is_calm=is_calm)
        client.close()
        self._run_out(lambda: client.stream.closed, "the last connection never ends")


def _operation(target: str, fields: dict[str, Any]) -> Request:
    return Request("POST", target, json.dumps(fields).encode(), ADMIN_KEY)
