"""A server under hypothesis, as clients of its HTTP API have it: they ask, send ahead, break off and vanish."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.core.lifecycle import Phase
from trioengine.core.types import Cause
from trioengine.serve.limits import InFlight
from trioengine.testing.fuzz.http_client import HttpClient
from trioengine.testing.fuzz.oracles import check_worker
from trioengine.testing.fuzz.pictures import FILES, content_of
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.served import WHICH, ServedEnvironment
from trioengine.testing.fuzz.watching import stopping
from trioengine.testing.fuzz.world import LIMITS
from trioengine.testing.simulated_peer import Mood

SWITCHES = (
    *("/sleep?mode=keep", "/sleep?level=2&mode=keep", "/sleep", "/sleep?mode=wait", "/sleep?mode=wait&timeout=0.5"),
    *("/wake_up", "/wake_up", "/wake_up?tags=weights", "/wakeup?tags=kv_cache", "/wake_up?reload=false"),
)
PROMPTS = ("a", "be", "<|im_end|>", "be" * 60)
TOKENS = st.sampled_from((1, 3, 20))


class HttpMachine(ServedEnvironment[HttpClient]):
    """Rules are what clients, and who runs the server, can do."""

    horizon = 800.0  # past the timeout of an idle connection
    max_buffered_bytes = 280  # one or two bodies
    max_buffered_bytes_with_pictures = 950

    def __init__(self) -> None:
        super().__init__()
        self._watch(InFlight, "abort", stopping(self.loop.crashes, self._saw_abort))

    @recorded(initialize, ready=st.sampled_from((True, True, True, False)), clients=st.integers(1, 2))
    def begin(self, ready: bool, clients: int) -> None:
        """Mostly from a server that is ready."""
        if ready:
            self._settle()
        for _ in range(clients):
            self._connect()

    @precondition(lambda self: self.may_connect)
    @recorded()
    def connect(self) -> None:
        self._connect()

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        prompt=st.sampled_from(PROMPTS),
        max_tokens=TOKENS,
        streams=st.booleans(),
        rounds=st.sampled_from((0, 0, 6, 9, 12, 15, 20)),
    )
    def ask(self, which: int, prompt: str, max_tokens: int, streams: bool, rounds: int) -> None:
        """A request, maybe while one is answered; how far it gets is given."""
        pick(self.speakers, which).ask(prompt, max_tokens, streams)
        if rounds:
            self._flow(rounds)

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
        pick(self.speakers, which).ask(content_of(media, prompt), max_tokens, streams)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.speakers and len(self.server.in_flight) > 0)
    @recorded(which=WHICH, request=WHICH, rounds=st.sampled_from((0, 6, 9)))
    def abort(self, which: int, request: int, rounds: int) -> None:
        """An operator ends a request by its id; it may be over when that arrives."""
        idle = [client for client in self.speakers if not client.is_active]
        pick(idle or self.speakers, which).abort(pick(list(self.server.in_flight._generations), request))
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(which=WHICH, how=st.sampled_from(SWITCHES), rounds=st.sampled_from((0, 0, 6, 12)))
    def switch(self, which: int, how: str, rounds: int) -> None:
        """An operator puts the engine to sleep, or wakes it, and may not wait for the answer."""
        self.troubles.causes.add(Cause.SLEEP)
        idle = [client for client in self.speakers if not client.is_active]
        pick(idle or self.speakers, which).switch(how)
        if rounds:
            self._flow(rounds)

    # ---- what the environment asks --------------------------------------------------------------------------------

    def _saw_abort(self, told: bool) -> None:
        self.troubles.operators |= told
        self.rare.saw("an operator aborts a request" if told else "an operator aborts what is over")

    def _connect(self) -> None:
        self._join(HttpClient(self.server.model_name, LIMITS.max_model_len, self.troubles))

    def _check_blocked(self) -> None:
        super()._check_blocked()
        going = [session for session in self.engine._sessions if session.phase in (Phase.PREPARING, Phase.RUNNING)]
        asking = [client for client in self.clients if client.mood is not Mood.GONE and client.is_active]
        assert len(going) <= len(asking), f"{going} go on for {len(asking)} clients"

    def _check(self) -> None:
        super()._check()
        if self.is_well:
            check_worker(self.engine, self._worker(), list(self.engine._sessions))
            stuck = [client for client in self.clients if client.is_active and client.is_heard]
            assert len(stuck) <= self._num_asleep, f"requests of {stuck} are never answered"
