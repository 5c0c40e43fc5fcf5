"""A server over a simulated engine, and clients of it: in memory, under MockClock."""

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import h11
import pytest
import trio
from trio.testing import memory_stream_pair
from trio_websocket import wrap_client_stream

from helpers.secured import CERTIFICATE, secured, server_context
from trioengine import Engine, EngineConfig
from trioengine.actors.observer import Observer
from trioengine.serve.config import ServeConfig
from trioengine.serve.limits import ByteBudget, Held
from trioengine.serve.server import Server
from trioengine.testing import Simulation, simulated_engine
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import DEFAULT_LIMITS

HOST = "localhost"
SIMULATED = (Behaviour(),)
CHAT = "/v1/chat/completions"
FAILING = EngineConfig(model="toy", max_num_seqs=8, on_worker_loss="fail")
where_a_loss_fails = pytest.mark.parametrize("engine_config", [FAILING], ids=["fail"])  # requests, they go on otherwise


def held():
    """An account of a large budget."""
    return Held(ByteBudget(1 << 30, 1 << 30), None)


def chat(content="hello", **fields):
    """The body of a greedy chat completion that ends by its length."""
    messages = [{"role": "user", "content": content}]
    return {"model": "toy", "messages": messages, "temperature": 0, "max_tokens": 5, "ignore_eos": True} | fields


class Client:
    """A Realtime client: every event it gets is checked for its number, and kept."""

    def __init__(self, websocket):
        self.websocket = websocket
        self.events = []
        self.token = None  # of a session that can be resumed

    async def send(self, name, **fields):
        await self.websocket.send_message(json.dumps({"type": name, **fields}))

    async def say(self, text, role="user", **fields):
        part = "output_text" if role == "assistant" else "input_text"
        item = {"type": "message", "role": role, "content": [{"type": part, "text": text}], **fields}
        await self.send("conversation.item.create", item=item)

    async def next(self):
        event = json.loads(await self.websocket.get_message())
        assert event["sequence_number"] == len(self.events)
        assert event["event_id"] not in {earlier["event_id"] for earlier in self.events}
        self.events.append(event)
        return event

    async def until(self, name):
        """The next event of this type, the others are skipped."""
        while (event := await self.next())["type"] != name:
            pass
        return event

    async def respond(self, **options):
        """A whole response."""
        await self.send("response.create", response=options)
        return (await self.until("response.done"))["response"]

    async def ask(self, text, **options):
        await self.say(text)
        return await self.respond(**options)


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        error = self.json["error"]
        assert error.keys() >= {"message", "type", "param", "code"}
        return error

    @property
    def events(self):
        return events_of(self.body)


def events_of(data):
    """What the data lines of whole events say; comments are skipped."""
    *events, rest = data.decode().split("\n\n")
    assert rest == ""
    lines = [event.removeprefix("data: ") for event in events if not event.startswith(":")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


class HttpClient:
    """Requests on one connection."""

    def __init__(self, stream):
        self.stream = stream
        self._h11 = h11.Connection(h11.CLIENT)

    async def send(self, method, path, content=None, **headers):
        """A request; `content` is bytes, or something for JSON."""
        body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        lines = {"host": HOST, "content-length": str(len(body)), **headers}
        request = h11.Request(method=method, target=path, headers=list(lines.items()))
        events = (request, h11.Data(data=body), h11.EndOfMessage())
        await self.stream.send_all(b"".join(self._h11.send(event) or b"" for event in events))

    async def event(self):
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(bytes(await self.stream.receive_some()))
        return event

    async def head(self):
        head = await self.event()
        assert isinstance(head, h11.Response), head
        return head.status_code, {name.decode(): value.decode() for name, value in head.headers}

    async def piece(self):
        """The next piece of the body, as it was sent; None at its end."""
        event = await self.event()
        return bytes(event.data) if isinstance(event, h11.Data) else None

    async def answer(self):
        """A whole response."""
        status, headers = await self.head()
        return Answer(status, headers, await self.rest())

    async def rest(self):
        """What is left of the body."""
        body = b""
        while (piece := await self.piece()) is not None:
            body += piece
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
        return body

    async def request(self, method, path, content=None, **headers):
        await self.send(method, path, content, **headers)
        return await self.answer()


class Clients:
    """A server, and ways to reach it; with `tls` they are all secured by its certificate."""

    def __init__(self, engine, simulation, nursery, *, tls=False, **options):
        self.engine = engine
        self.simulation = simulation
        certificate = {"ssl_certfile": CERTIFICATE} if tls else {}
        config = ServeConfig(**{"served_model_name": "toy"} | certificate | options)
        self.server = Server(engine, config, server_context() if tls else None)
        self.server.realtime.sessions.run_in(nursery)
        self._tls = tls
        self._nursery = nursery
        self.served = []
        self._num_open = 0
        self._closed = trio.Event()

    def stream(self, ours=None, theirs=None):
        """A connection as bytes; returns the client's end."""
        ours = self.plain_stream(ours, theirs)
        return secured(ours) if self._tls else ours

    def plain_stream(self, ours=None, theirs=None):
        """A connection as the bytes on the wire, before TLS."""
        if ours is None:
            ours, theirs = memory_stream_pair()
        self._num_open += 1
        self._nursery.start_soon(self._serve, theirs)
        return ours

    async def dial(self):
        """For trioengine.connect; the server's ends are kept."""
        await trio.lowlevel.checkpoint()
        ours, theirs = memory_stream_pair()
        self.served.append(theirs)
        return self.stream(ours, theirs)

    async def _serve(self, stream):
        await self.server.connections.handle(stream)
        self._num_open -= 1
        self._closed.set()
        self._closed = trio.Event()

    async def all_closed(self):
        while self._num_open:
            await self._closed.wait()

    @asynccontextmanager
    async def realtime(self, stream=None, path="/v1/realtime", **options):
        """A Realtime client whose session.created was read."""
        async with trio.open_nursery() as nursery:
            stream = self.stream() if stream is None else stream
            websocket = await wrap_client_stream(nursery, stream, HOST, path, **options)
            client = Client(websocket)
            assert (await client.next())["type"] == "session.created"
            yield client
            with trio.move_on_after(5):
                await websocket.aclose()
            nursery.cancel_scope.cancel()

    async def http(self, request, silence=1):
        """What the server says to these bytes until it closes or falls silent."""
        stream = self.stream()
        await stream.send_all(request)
        return await read_all(stream, silence)

    @asynccontextmanager
    async def connect(self, *pair):
        """An HTTP client with a connection of its own."""
        stream = self.stream(*pair)
        try:
            yield HttpClient(stream)
        finally:
            await trio.aclose_forcefully(stream)

    async def request(self, method, path, content=None, **headers):
        """One answer, on a connection of its own."""
        async with self.connect() as client:
            return await client.request(method, path, content, **headers)

    async def chat(self, content="hello", **fields):
        """A chat completion."""
        return await self.request("POST", CHAT, chat(content, **fields))

    async def everything_is_given_back(self):
        while self.engine.statistics().sessions:
            await self.engine.runtime.gate.changed()
        await self.engine.check_invariants()
        statistics = self.engine.statistics()
        assert (statistics.preparing, statistics.waiting, statistics.running, statistics.suspended) == (0, 0, 0, 0)
        assert statistics.worker_sessions == 0


@asynccontextmanager
async def open_clients(config=None, limits=DEFAULT_LIMITS, behaviours=SIMULATED, **options):
    """A server with these fields of its ServeConfig, whose engine is ready; at the end nothing may be left."""
    opening = simulated_engine(config, limits=limits, behaviours=behaviours)
    async with opening as (engine, simulation), trio.open_nursery() as nursery:
        clients = Clients(engine, simulation, nursery, **options)
        yield clients
        clients.server.connections.close_idle()
        with trio.fail_after(60):
            await clients.all_closed()
            await clients.everything_is_given_back()
        assert clients.server.budget.num_bytes == 0
        assert clients.engine.runtime.images.budget.payloads == ()


@asynccontextmanager
async def clients_of_a_loading_server(limits):
    """A server, and an event: until it is set, its model is looked for."""
    found = trio.Event()

    async def find_model(model, progress):
        await found.wait()
        return Path(model)

    async with trio.open_nursery() as nursery:
        simulation = Simulation(nursery, limits=limits)
        engine = Engine(EngineConfig(model="toy"), ports=replace(simulation.ports, find_model=find_model))
        nursery.start_soon(engine.run)
        yield Clients(engine, simulation, nursery), found
        nursery.cancel_scope.cancel()


class _FirstToken(Observer):
    def __init__(self):
        self.came = trio.Event()

    def first_token(self, seconds, usage):
        self.came.set()


async def first_token(engine):
    """Wait until a request, of which there is none yet, gets its first token."""
    observer = _FirstToken()
    engine.observers.append(observer)
    await observer.came.wait()
    engine.observers.remove(observer)


async def finished(engine, count):
    """Wait until so many requests ran to their end."""
    while engine.statistics().finished < count:
        await engine.runtime.gate.changed()


async def receive_late(stream, size, send_timeout):
    """Receive a slice as the server sends it, or over TLS a quarter of it, which is one record.

    It comes when nearly half of the time has passed after which its client is taken for gone; a simulated time.
    """
    await trio.sleep(0.45 * send_timeout / (4 if isinstance(stream, trio.SSLStream) else 1))
    return await stream.receive_some(size)


async def read_all(stream, silence=1):
    data = b""
    with trio.move_on_after(silence) as scope:
        while received := await stream.receive_some():
            data += received
            scope.deadline = trio.current_time() + silence
    return data


def status_and_body(data):
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else body
