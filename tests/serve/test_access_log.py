"""Each request has an id and a line in the log; records in its course have the id as well."""

import json
import logging

import pytest
import trio
from helpers.clients import CHAT, chat, open_clients, read_all, status_and_body
from trio.testing import wait_all_tasks_blocked

from trioengine.cli.logs import JsonFormatter
from trioengine.serve.access_log import request_id
from trioengine.serve.chat_request import ChatRequest
from trioengine.serve.http import HttpRequest
from trioengine.serve.log_fields import REQUEST_ID, ContextFilter, set_fields

ACCESS = "trioengine.access"


def get(path, *headers):
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


@pytest.fixture
def log(caplog):
    """Records with the fields of their context."""
    caplog.set_level(logging.DEBUG, "trioengine")
    context = ContextFilter()
    caplog.handler.addFilter(context)
    yield caplog
    caplog.handler.removeFilter(context)


def lines(log):
    return [record for record in log.records if record.name == ACCESS]


def id_in(data):
    (line,) = (line for line in data.split(b"\r\n\r\n")[0].split(b"\r\n") if line.startswith(b"x-request-id: "))
    return line.removeprefix(b"x-request-id: ").decode()


async def test_a_line_for_each_request(autojump_clock, clients, log):
    targets = ("/health", "/nothing?a=secret", "/version?a=secret", "/version?secret", "/v1/realtime")
    data = await clients.http(b"".join(map(get, targets)))
    assert [(line.method, line.path, line.status) for line in lines(log)] == [
        ("GET", "/health", 200),
        ("GET", "/nothing", 404),
        ("GET", "/version", 400),
        ("GET", "/version", 400),
        ("GET", "/v1/realtime", 426),
    ]
    assert lines(log)[0].getMessage() == "GET /health 200 0.0 ms"
    assert len({line.request_id for line in lines(log)}) == 5
    assert id_in(data) == lines(log)[0].request_id
    assert "secret" not in log.text


async def test_what_asks_every_few_seconds_fills_no_log(autojump_clock, clients, log):
    await clients.http(get("/ready") + get("/metrics") + get("/version"))
    clients.simulation.worker.exit(-9)
    await wait_all_tasks_blocked()
    await clients.http(get("/ready"))
    assert [(line.path, line.status, line.levelname) for line in lines(log)] == [
        ("/ready", 200, "DEBUG"),
        ("/metrics", 200, "DEBUG"),
        ("/version", 200, "INFO"),
        ("/ready", 503, "DEBUG"),
    ]


async def test_a_refusal_has_its_line_and_its_id(autojump_clock, log):
    async with open_clients(api_key="a") as clients:
        data = await clients.http(get("/version"))
        (line,) = lines(log)
        assert (line.status, line.request_id) == (401, id_in(data))


UNREADABLE = [(b"garbage\r\n\r\n", 400), (get("/", "X: " + "y" * 40_000), 431), (get("http://["), 400)]


@pytest.mark.parametrize(("data", "status"), UNREADABLE)
async def test_a_head_that_cannot_be_read_has_them_too(autojump_clock, clients, log, data, status):
    answer = await clients.http(get("/version") + data)
    _, line = lines(log)
    assert (line.method, line.path, line.status, line.levelname) == ("-", "-", status, "INFO")
    assert line.request_id == id_in(answer[answer.rindex(b"HTTP/1.1 4") :])


async def test_the_time_it_took(autojump_clock, clients, log):
    stream = clients.stream()
    await stream.send_all(get("/version", "Content-Length: 2"))
    await trio.sleep(1.5)
    await stream.send_all(b"{}")
    await read_all(stream)
    (line,) = lines(log)
    assert line.milliseconds == 1500


async def test_a_client_that_leaves_before_it_is_answered(autojump_clock, clients, log):
    log.clear()  # of what the engine said
    stream = clients.stream()
    await stream.send_all(get("/version", "Content-Length: 2", "X-Request-Id: mine"))
    await stream.aclose()
    await clients.all_closed()
    assert [record.getMessage() for record in log.records] == [
        "GET /version - 0.0 ms",
        "client disconnected: it closed the connection in the middle of a request",
    ]
    assert {record.request_id for record in log.records} == {"mine"}


GIVEN = [
    (b"mine", True),
    (b"m" * 128, True),
    (b"a.b-c_d/e:f@g+h~!", True),
    (b"m" * 129, False),
    (b"", False),
    (b"\xe9", False),
]


FORGED = [(b"a" + byte + b"b", False) for byte in (b" ", b"\t", b"[", b"]", b"(", b"{", b"<", b"=", b'"', b"'", b"`")]


@pytest.mark.parametrize(("given", "is_kept"), GIVEN + FORGED)
async def test_the_clients_own_id(autojump_clock, clients, given, is_kept):
    data = await clients.http(get("/health").replace(b"\r\n\r\n", b"\r\nX-Request-ID: " + given + b"\r\n\r\n"))
    assert (id_in(data) == given.decode("latin-1")) == is_kept
    if not is_kept:
        assert id_in(data).startswith("req_")


def test_ids_are_minted():
    assert request_id(HttpRequest("GET", "/", "", ())) != request_id(HttpRequest("GET", "/", "", ()))


async def test_what_a_handler_logs_is_about_its_request(autojump_clock, clients, log, monkeypatch):
    monkeypatch.setattr("trioengine.serve.routes.__version__", object())  # no JSON
    log.clear()  # of what the engine said
    data = await clients.http(get("/version", "x-request-id: one") + get("/health", "x-request-id: two"))
    assert data.startswith(b"HTTP/1.1 500 ")
    found = [(record.getMessage(), record.request_id) for record in log.records]
    assert found[0] == ("the handler of /version crashed", "one")
    assert [id for _, id in found] == ["one", "one", "two"]


async def test_a_websocket(autojump_clock, clients, log):
    """It is a request whose line comes when it is over; its responses have ids of their own."""
    async with clients.realtime(extra_headers=[(b"X-Request-Id", b"mine")]) as client:
        assert (b"x-request-id", b"mine") in client.websocket.handshake_headers
        await client.ask("hello")
        session = client.events[0]["session"]["id"]
    await clients.all_closed()
    (line,) = lines(log)
    assert (line.method, line.path, line.status, line.request_id) == ("GET", "/v1/realtime", 101, "mine")
    assert line.session == session


async def test_a_chat_completion(autojump_clock, clients, log):
    """Its line has the id by which an operator can abort it; the next request's on the connection has not."""
    async with clients.connect() as client:
        completion = (await client.request("POST", CHAT, chat())).json
        await client.request("GET", "/version")
    assert [line.session for line in lines(log)] == [completion["id"], None]


async def test_a_response_is_logged_under_its_id(autojump_clock, clients, log, monkeypatch):
    def begin(self):
        logging.getLogger("trioengine").info("in the response")
        raise ZeroDivisionError

    monkeypatch.setattr("trioengine.serve.realtime.output.Output.begin", begin)
    async with clients.realtime() as client:
        await client.say("hello")
        await client.send("response.create")
        response = await client.until("response.created")
        await client.until("error")
    (record,) = (record for record in log.records if record.getMessage() == "in the response")
    assert record.request_id == response["response"]["id"]
    assert record.session == client.events[0]["session"]["id"]


async def test_a_context_is_left():
    with set_fields({REQUEST_ID: "a"}):
        with set_fields({REQUEST_ID: "b"}):
            assert REQUEST_ID.get() == "b"
        assert REQUEST_ID.get() == "a"
    assert REQUEST_ID.get() is None


# ---- why a request is refused ---------------------------------------------------------------------------------------

KEY = "k" * 16
AS_USER = f"Authorization: Bearer {KEY}"


def post(path, content, *headers):
    body = json.dumps(content)
    return get(path, f"Content-Length: {len(body)}", *headers).replace(b"GET", b"POST", 1) + body.encode()


def error_in(data):
    error = status_and_body(data)[1]["error"]
    return error["type"], error["code"], error["message"]


REFUSED = [
    (post(CHAT, {}, AS_USER), 400),
    (get("/version"), 401),
    (post("/sleep", {}, AS_USER), 403),
    (get("/nothing", AS_USER), 404),
    (get(CHAT, AS_USER), 405),
    (post(CHAT, "x" * 10_000, AS_USER), 413),
    (get("http://["), 400),
]


@pytest.mark.parametrize(("sent", "status"), REFUSED, ids=range(len(REFUSED)))
async def test_a_refusal_has_its_reason(autojump_clock, log, sent, status):
    """The error of the response, in the line and in its fields."""
    async with open_clients(api_key=KEY, max_body_size=5_000) as clients:
        answer = await clients.http(sent)
        (line,) = lines(log)
        assert line.status == status
        assert (line.error_type, line.error_code, line.error_message) == error_in(answer)
        assert line.getMessage().endswith(f" ms: {line.error_code}: {line.error_message}")
        assert json.loads(JsonFormatter().format(line))["error_message"] == line.error_message
        assert KEY not in log.text


async def test_one_too_many_has_its_reason(autojump_clock, log):
    async with open_clients(api_key=KEY, max_sessions_per_key=1) as clients:
        async with clients.realtime(extra_headers=[(b"Authorization", f"Bearer {KEY}".encode())]):
            await clients.http(get("/version", AS_USER))
        line = lines(log)[0]
        assert (line.status, line.error_type, line.error_code) == (429, "rate_limit_error", "too_many_sessions")


@pytest.mark.parametrize("sent", [get("/version"), b"GET"])
async def test_one_without_a_place_has_its_reason(autojump_clock, log, sent):
    async with open_clients(max_connections=1) as clients, clients.realtime():
        stream = clients.stream()
        await stream.send_all(sent)
        await read_all(stream, silence=100)
        (line,) = lines(log)
        assert (line.status, line.error_code) == (503, "too_many_connections")
        assert line.error_message == "connection limit reached (1)"


async def test_what_is_served_has_no_reason(autojump_clock, clients, log):
    await clients.http(get("/nothing") + get("/version"))
    assert [hasattr(line, "error_code") for line in lines(log)] == [True, False]


SECRET = "correct horse"
VALUES = [SECRET, [SECRET], {"type": SECRET}, [{"role": SECRET, "content": SECRET}], [{"role": "user", "content": {}}]]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
async def test_values_of_a_request_are_not_logged(autojump_clock, clients, log, value):
    """Messages may quote them to the client. The name of an unknown model is logged, for the operator to see."""
    fields = ChatRequest.__dataclass_fields__.keys() - {"model"}
    names = {"temperature", "stop", "n", "tools", "messages", "metadata", "logit_bias", "stream_options", *fields}
    for name in sorted(names):
        await clients.http(post(CHAT, chat(SECRET, **{name: value})))
    for path in ("/sleep?level=", "/sleep?mode=", "/wake_up?tags=", "/wake_up?reload="):
        await clients.http(post(path + SECRET.replace(" ", "%20"), {}))
    await clients.http(post("/tokenize", {"prompt": value, "messages": value}))
    assert {line.status for line in lines(log)} >= {400}
    assert "horse" not in log.text


async def test_values_that_a_template_quotes_are_not_logged(autojump_clock, clients, log, monkeypatch):
    template = clients.engine.tokenizer._template
    quoting = type(template)("{{ raise_exception(messages[0]['content']) }}")
    monkeypatch.setattr(template, "_template", quoting._template)
    answer = await clients.http(post(CHAT, chat(SECRET)))
    (line,) = lines(log)
    assert error_in(answer) == (line.error_type, "template_error", f"messages: the chat template raised: {SECRET}")
    assert line.error_message == "messages: the chat template"
    assert "horse" not in log.text


HOSTS = [("Host: evil.org:80", "evil.org:80"), ("Host:", ""), ("Host: " + "x" * 300, "x" * 100)]


@pytest.mark.parametrize(("header", "shown"), HOSTS)
async def test_a_refused_host_has_its_remedy(autojump_clock, clients, log, header, shown):
    log.clear()  # of what the engine said
    answer = await clients.http(get("/version").replace(b"Host: localhost", header.encode()))
    said, line = (record for record in log.records if record.levelno > logging.DEBUG)
    assert said.getMessage() == f"a request was refused for its Host {shown!r}; --allowed-host NAME would allow it"
    assert said.levelname == "WARNING"
    rule = "is neither an --allowed-host nor, on a server of this machine, a loopback name such as localhost"
    assert error_in(answer) == (line.error_type, "forbidden", f"the Host {shown!r} {rule}")
