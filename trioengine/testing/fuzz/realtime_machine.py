"""The Realtime server under hypothesis: clients that talk, stall, break off and vanish."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, Literal

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from trioengine.serve.realtime.outbox import SHOWN
from trioengine.testing.fuzz import inside, inside_payloads, inside_server
from trioengine.testing.fuzz.conversations import FILES, content_of
from trioengine.testing.fuzz.environment import Switch
from trioengine.testing.fuzz.inside_payloads import Payload
from trioengine.testing.fuzz.oracles import check_worker
from trioengine.testing.fuzz.peers import WHICH
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.promptness import ROUNDING
from trioengine.testing.fuzz.realtime_client import RealtimeClient
from trioengine.testing.fuzz.realtime_conversation import Conversation
from trioengine.testing.fuzz.realtime_session import Cuts, Session
from trioengine.testing.fuzz.realtime_shapes import ALWAYS_REFUSED, PASSED_OVER
from trioengine.testing.fuzz.served import KEPT, MAX_CLIENTS, ServedEnvironment
from trioengine.testing.fuzz.world import LIMITS

PROMPTS = ("a", "be", "<|im_end|>")
TOKENS = st.sampled_from((1, 3, 20))
SENDS = (
    *("cancel", "cancel", "respond", "say", "delete", "instruct", "odd", "ping"),
    *("cancel by id", "truncate", "cancel beside", "cancel beside", "say first", "retrieve"),
    *("say between", "say twice", "refer", "forget"),
    *("cancel and respond", "cancel and respond", "cancel twice and respond", "configure"),
    *("tools", "no tools", "answer a call"),
)
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
RETURNS = ("take over", "take over", "reset", "reset", "reset", "hang up", "vanish", "strange")
LONG = 10_500  # bytes of a message that is dropped where there are items


class RealtimeMachine(ServedEnvironment[RealtimeClient]):
    """Rules are actions of clients and of the operator of the server."""

    max_buffered_bytes = 12_000  # some items, and the events about one more
    max_buffered_bytes_with_pictures = 24_000
    serve_config: ClassVar[dict[str, Any]] = {
        "max_conversation_size": 4000,  # some items
        "handshake_timeout": 5.0,
        "client_ping_interval": 8.0,
        "send_timeout": 9.0,
    }
    _window = 0  # seconds, of the sessions that begin; 0: they end with their connections
    horizon = 120.0  # past the timeouts of pings, of sending and of closing, one after the other

    def __init__(self) -> None:
        super().__init__()
        self._sessions: list[Session] = []  # of clients
        self._delays = 0.0  # seconds by which the clock has jumped over the beginnings of tasks
        self.engine.observers.append(Cuts(self._sessions))

    @recorded(
        initialize,
        ready=st.sampled_from((True, True, True, False)),
        clients=st.sampled_from((1, 1, 1, 2)),
        turns=st.sampled_from((0, 0, 0, 1)),
        window=st.sampled_from((0, 0, 5, 12)),
    )
    def begin(self, ready: bool, clients: int, turns: int, window: int) -> None:
        """Mostly from a server that is ready, with clients that have talked; maybe their sessions have a window."""
        self._window = window
        if window:
            self._make_room()
        for _ in range(clients):
            self._connect()
        if ready:
            self._settle()
        for client in self.clients if ready and turns else ():
            client.say("a")
            client.respond(1)
        if ready and turns:
            self._settle()

    # ---- clients --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.may_connect)
    @recorded()
    def connect(self) -> None:
        self._connect()

    @precondition(lambda self: self._window and self.may_connect and self._resumable)
    @recorded(
        which=WHICH,
        how=st.sampled_from(RETURNS),
        again=st.sampled_from((False, False, True)),
        share=st.sampled_from((0.0, 0.0, 0.6, 0.6, 0.9, 1.0)),
        lacks=st.sampled_from((0, 0, 0, 1, 4, 99)),
        rounds=st.sampled_from((0, 6, 9, 20)),
    )
    def come_back(self, which: int, how: str, again: bool, share: float, lacks: int, rounds: int) -> None:
        """A client loses its connection, or not, waits for this share of the window, and resumes its session.

        Once all has come to rest it may do so again. It may pretend to lack the last events that it has got. A stranger
        has a token of no session.
        """
        session = self._new_session(is_strange=True) if how == "strange" else pick(self._resumable, which)
        self._return_to(session, how, share, lacks)
        if again:
            self._settle()
            self._check()
            self._return_to(session, how, share, lacks)
        if rounds:
            self._flow(rounds)

    def _return_to(self, session: Session, how: str, share: float, lacks: int) -> None:
        if how not in ("strange", "take over"):
            self._lose(session, how)
        if share:
            self._let_pass(share * self._window)
        if self.may_connect:
            self._join(RealtimeClient(session, self.server.config, session.ask_after(lacks)))

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        prompt=st.sampled_from(PROMPTS),
        max_tokens=TOKENS,
        rounds=st.sampled_from((0, 0, 0, 6, 9)),
    )
    def ask(self, which: int, prompt: str, max_tokens: int, rounds: int) -> None:
        """An item and a response, without waiting for an answer; how far they get is given."""
        client = pick(self.speakers, which)
        client.say(prompt)
        client.respond(max_tokens)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(which=WHICH, text=st.sampled_from(("", "b")), rounds=st.sampled_from((0, 0, 6, 9)))
    def ask_beside(self, which: int, text: str, rounds: int) -> None:
        """A response beside the conversation, from it or from a text alone; how far it gets is given."""
        pick(self.speakers, which).respond_beside(20, text or None)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        use=st.sampled_from(("required", "required of two", "single", "named", "none", "auto")),
        max_tokens=st.sampled_from((66, 66, 57, 20)),
        rounds=st.sampled_from((0, 0, 20, 80, 80)),
    )
    def ask_with_tools(self, which: int, use: str, max_tokens: int, rounds: int) -> None:
        """A response beside the conversation that has tools of its own."""
        pick(self.speakers, which).respond_beside(max_tokens, "a", use)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.shows and self.has_speakers)
    @recorded(
        which=WHICH,
        media=st.sampled_from(FILES),
        prompt=st.sampled_from(("", "a")),
        how=st.sampled_from(("item", "ask", "ask", "beside")),
        rounds=st.sampled_from((0, 0, 0, 6, 9)),
    )
    def show(self, which: int, media: str, prompt: str, how: str, rounds: int) -> None:
        """An item with pictures, maybe with a response; or a response to one beside the conversation."""
        client, content = pick(self.speakers, which), content_of(media, prompt)
        if how == "beside":
            client.respond_beside(3, content)
        else:
            client.say(content)
        if how == "ask":
            client.respond(3)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(which=WHICH, what=st.sampled_from(SENDS))
    def send(self, which: int, what: str) -> None:
        """One event, whatever is in progress."""
        client = pick(self.speakers, which)
        conversation = client.conversation
        match what:
            case "cancel":
                self._note_moment(client)
                client.cancel()
            case "respond":
                client.respond(20, {"of": "the fuzzer"})
            case "cancel and respond":
                self._note_moment(client)
                if client.is_active:
                    self.coverage.saw("a response is asked for right after a cancel")
                client.cancel()
                client.respond(3)
            case "cancel twice and respond":  # the second cancel is for the response behind the first
                for _ in range(2):
                    client.cancel()
                    client.respond(20)
            case "configure":
                client.ask("session.update", session={"type": "realtime", "instructions": "be", **PASSED_OVER})
            case "tools":  # hidden, as the text of them is longer than the context
                client.ask("session.update", session={"tools": [TOOL], "tool_choice": "none"})
            case "no tools":
                client.ask("session.update", session={"tools": [], "tool_choice": "auto"})
            case "answer a call":
                client.answer_call("no")
            case "cancel by id":
                self._note_moment(client)
                client.cancel(by_id=True)
            case "say":
                client.say("hi")
            case "say first":
                client.say("hi", previous="root")
            case "say between":
                client.say("or", previous=conversation.middle)
            case "say twice":  # only one can have this id
                client.say("hi", id="own")
                client.say("be", id="own")
            case "refer":
                client.refer()
            case "forget":
                client.ask("session.update", session={"type": "realtime", "instructions": None})
            case "retrieve":
                client.ask(
                    "conversation.item.retrieve",
                    item_id=conversation.last,
                )
            case "delete":
                client.ask(
                    "conversation.item.delete",
                    item_id=conversation.last,
                )
            case "instruct":
                truncation = "disabled" if conversation.truncation == "auto" else "auto"
                settings = {"type": "realtime", "instructions": "be", "truncation": truncation}
                client.ask("session.update", session=settings)
            case "odd":
                client.ask_wrongly("odd", LONG)
            case "truncate":
                client.truncate(1)
            case "cancel beside":
                if client.cancel_beside():
                    self.coverage.saw("a response beside the conversation is cancelled")
            case "ping":
                client.ping()

    @precondition(lambda self: len(self._answered) > 0)
    @recorded(which=WHICH, text_end=st.sampled_from((0, 0, 1, 99)))
    def truncate(self, which: int, text_end: int) -> None:
        """Cut the last answer of a client."""
        pick(self._answered, which).truncate(text_end)
        self.coverage.saw("an answer is truncated")

    @property
    def _answered(self) -> list[RealtimeClient]:
        """The clients that have an answer."""
        return [client for client in self.speakers if client.conversation.ids_of("assistant")]

    @precondition(lambda self: self.has_speakers)
    @recorded(which=WHICH, how=st.sampled_from(tuple(ALWAYS_REFUSED)))
    def send_wrong(self, which: int, how: str) -> None:
        """An event that is refused, with its code and param."""
        pick(self.speakers, which).ask_wrongly(how)

    @precondition(lambda self: self.engine.power.asleep or any(client.is_active for client in self.clients))
    @recorded(how=st.sampled_from(("keep", "wake", "wake", "wake", "abort", "wait", "weights", "update")))
    def switch(self, how: Switch | Literal["update"]) -> None:
        """The operator puts the engine to sleep, wakes it, or loads the weights that it has, as another version."""
        self._switch_or_update(how)

    @precondition(lambda self: self._window and self._resumable and not self.engine.power.asleep)
    @recorded(which=WHICH, how=st.sampled_from(("hang up", "reset")), mode=st.sampled_from(("keep", "abort", "wait")))
    def sleep_without(self, which: int, how: str, mode: Switch) -> None:
        """The engine is put to sleep while a session waits for its client to come back."""
        self._lose(pick(self._resumable, which), how)
        self._settle()
        self._switch_or_update(mode)
        self._settle()
        self._check()

    # ---- overrides --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        session = self._new_session()
        self._sessions.append(session)
        self._join(RealtimeClient(session, self.server.config))

    def _new_session(self, *, is_strange: bool = False) -> Session:
        return Session(
            Conversation(self.server.config, LIMITS.max_model_len, self.faults),
            self.faults,
            self.loop.clock.current_time,
            self._window,
            kept=KEPT,
            sizes=self.watch.events.__getitem__,
            saw=self.coverage.saw,
            is_strange=is_strange,
        )

    @property
    def _resumable(self) -> list[Session]:
        """Sessions with a token: first those that may go on, then those that are over, until one is refused."""
        known = (each for each in self._sessions if each.token and not each.has_refused)
        return sorted(known, key=lambda session: session.is_over)

    def _lose(self, session: Session, how: str) -> None:
        """The connection on which a client sends is lost in this way."""
        for client in [client for client in self.clients if client is session.speaker]:
            session.lost = how
            {"reset": client.reset, "hang up": client.hang_up, "vanish": client.vanish}[how]()

    def _let_pass(self, seconds: float) -> None:
        """Settle again and again while so much time passes."""
        until = self.seconds + seconds
        self._settle()
        self._check()
        while self.seconds < until:
            step = min(self.loop.seconds_to_next_deadline(), until - self.seconds)
            if self.worker is not None and self.worker.seconds_to_recover > 0.0:
                step = min(step, self.worker.seconds_to_recover)
            self.loop.clock.jump(max(step, 0.0))
            self._settle()
        self._check()

    def _jump(self, seconds: float) -> None:
        self._delays += max(0.0, seconds - self.loop.seconds_of_rest())
        super()._jump(seconds)

    def _make_room(self) -> None:
        most = self.max_buffered_bytes_with_pictures if self.shows else self.max_buffered_bytes
        inside_server.set_max_buffered_bytes(self.server, most + (MAX_CLIENTS * KEPT if self._window else 0))

    def _outlast(self) -> None:
        began = self.seconds
        self._run_out(lambda: not inside_server.num_going(self.server), "sessions outlive their windows")
        waited = self.seconds - began
        assert waited <= self._window + ROUNDING, f"sessions go on for {waited:g} s without a client"
        self._run_out(lambda: not len(self.server.realtime.sessions), "sessions that are over do not end")

    def _look(self) -> None:
        super()._look()
        if self.payloads.any_made:
            self._check_kept()

    def _check_kept(self) -> None:
        """After every rule: images are kept for conversations, and for responses that are not over, and no others.

        A connection that is about to end may have released its responses' images.
        """
        found = Counter(payload for each in self.payloads.kept for payload in inside_payloads.kept_by(each))
        in_items: Counter[Payload] = Counter()
        in_responses: Counter[Payload] = Counter()
        at_least: Counter[Payload] = Counter()
        is_cut = inside_server.has_cut_connections(self.server)
        for connection in self.watch.connections:
            of_responses = Counter(inside_server.response_payloads(connection))
            in_items.update(inside_server.item_payloads(connection))
            in_responses += of_responses
            if not (is_cut or inside_server.has_gone(connection)):
                at_least += of_responses
        assert in_items + at_least <= found <= in_items + in_responses, (
            f"kept are {found}, in items are {in_items}, in responses {in_responses}"
        )

    def _check_blocked(self) -> None:
        super()._check_blocked()
        self.watch.check_cancelled()

    def _check(self) -> None:
        super()._check()
        self._check_sessions()
        for client in self.clients:
            client.check_deaf(self.seconds - self._delays)
        if self.is_closing:
            for client in self.clients:
                client.check_closed()
        if self.is_well:
            check_worker(self.engine, self._worker(), inside.sessions(self.engine))
            stuck = [id for client in self.clients for id in client.stuck]
            assert len(stuck) <= self._num_asleep, f"responses {stuck} never end"
            for client in self.clients:
                self._check_state(client)
        for each in self.watch.connections:
            kept, most = inside_server.num_kept(each), KEPT if self._window else 0
            assert kept <= most, f"{kept} characters of sent events are kept, at most {most} may be"
        counted = {each.id: inside_server.num_held_bytes(each) for each in self.watch.connections}
        for client in self.clients:
            if client.conversation.session_id in counted:
                client.check_bytes(counted[client.conversation.session_id])

    def _check_sessions(self) -> None:
        """Sessions whose windows have passed are over."""
        for session in self._sessions:
            session.rest()
        going, most = inside_server.num_going(self.server), sum(not session.is_over for session in self._sessions)
        assert going <= most, f"{going} sessions go on, of which at most {most} have a client, or wait for it"

    def _check_state(self, client: RealtimeClient) -> None:
        if not client.is_served:
            return
        conversation, shown = client.conversation, SHOWN[self.engine.state]
        heard = conversation.engine_state
        assert heard == shown, f"{client} hears {heard}, the engine is {shown}"
        version = self.engine.power.weight_version
        if conversation.weight_version is None:  # it came while the engine was awake
            conversation.weight_version = version
        of_weights = conversation.weight_version
        assert of_weights == version, f"{client} hears of the weights {of_weights}, the engine has {version}"

    def _note_moment(self, client: RealtimeClient) -> None:
        if client.conversation.response is not None:
            self.coverage.saw("a cancel crosses events of the server" if len(client.to_client) else "a cancel")
