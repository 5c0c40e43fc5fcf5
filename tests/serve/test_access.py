"""Access: keys, roles, the number of requests of a key, and the origins of requests."""

import json
import logging

import pytest
from helpers.clients import CHAT, chat, open_clients, read_all, status_and_body
from trio.testing import wait_all_tasks_blocked
from trio_websocket import HandshakeError

from trioengine.serve.auth import Access, Role
from trioengine.serve.config import ServeConfig
from trioengine.serve.http import BadRequest, HttpRequest

KEY, OTHER, ADMIN = "sk-secret-1", "sk-secret-2", "sk-secret-admin"
KEYS = {"api_key": (KEY, OTHER), "admin_key": ADMIN}
LONG = {"temperature": 0, "max_output_tokens": 400, "ignore_eos": True}


def get(path, *headers, host="localhost", method="GET"):
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def bearer(key):
    return f"Authorization: Bearer {key}"


def code_of(body):
    return body["error"]["code"]


CREDENTIALS = [
    ((bearer(KEY),), 200),
    ((bearer(OTHER),), 200),
    ((bearer(ADMIN),), 200),
    ((f"authorization: bearer  {KEY} ",), 200),
    ((), 401),
    ((bearer("wrong"),), 401),
    ((bearer(KEY + "x"),), 401),
    ((bearer(""),), 401),
    (("Authorization: Basic " + KEY,), 401),
    ((f"Authorization: {KEY}",), 401),
    ((bearer("s\xe9cret"),), 401),
    ((bearer(KEY), bearer("wrong")), 401),
    ((f"X-Api-Key: {KEY}",), 200),
    ((f"x-api-key: {ADMIN}",), 200),
    ((f"X-Api-Key: Bearer {KEY}",), 401),
    (("X-Api-Key: wrong",), 401),
    (("X-Api-Key:",), 401),
    ((f"X-Api-Key: {KEY}", f"X-Api-Key: {KEY}"), 401),
    ((f"X-Api-Key: {KEY}", bearer("wrong")), 401),
    ((bearer(KEY), "X-Api-Key: wrong"), 200),
    ((f"Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.{KEY}",), 401),
]


@pytest.mark.parametrize(("headers", "status"), CREDENTIALS, ids=range(len(CREDENTIALS)))
async def test_a_route_needs_a_key(autojump_clock, headers, status):
    async with open_clients(**KEYS) as clients:
        data = await clients.http(get("/version", *headers))
        answered, body = status_and_body(data)
        assert answered == status
        if status == 401:
            assert code_of(body) == "invalid_api_key"
            assert b"www-authenticate: Bearer\r\n" in data


SAID = [
    (None, Role.USER, "this needs a key, in the header Authorization: Bearer KEY"),
    (None, Role.OPERATOR, "this needs a key, in the header Authorization: Bearer KEY"),
    ("wrong", Role.USER, "this key is not accepted"),
    ("wrong", Role.OPERATOR, "this key is not accepted"),
]


@pytest.mark.parametrize(("key", "role", "message"), SAID)
def test_a_wrong_key_is_told_from_none(key, role, message):
    headers = ((b"host", b"localhost"), *([(b"authorization", b"Bearer " + key.encode())] if key else []))
    admitted = Access(ServeConfig(**KEYS)).admit(HttpRequest("GET", "/x", "", headers), role)
    with pytest.raises(BadRequest) as refused, admitted:
        pass
    assert refused.value.response.status == 401
    assert json.loads(refused.value.response.body)["error"]["message"] == message


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
async def test_what_is_for_anyone_needs_none(autojump_clock, path):
    async with open_clients(**KEYS) as clients:
        assert status_and_body(await clients.http(get(path)))[0] == 200
        assert status_and_body(await clients.http(get(path, bearer("wrong"))))[0] == 200


async def test_what_is_not_there_needs_one_too(autojump_clock):
    async with open_clients(**KEYS) as clients:
        assert status_and_body(await clients.http(get("/nothing")))[0] == 401
        assert status_and_body(await clients.http(get("/nothing", bearer(KEY))))[0] == 404
        assert status_and_body(await clients.http(get("/v1/realtime")))[0] == 401


def status_of(access, role, key=None):
    """What a request is answered that comes with this key; 200 if it is served."""
    headers = ((b"host", b"localhost"), *([(b"authorization", b"Bearer " + key.encode())] if key else []))
    try:
        with access.admit(HttpRequest("POST", "/x", "", headers), role):
            return 200
    except BadRequest as exc:
        return exc.response.status


def test_operators():
    access = Access(ServeConfig(**KEYS))
    found = [status_of(access, Role.OPERATOR, key) for key in (None, "wrong", KEY, ADMIN)]
    assert found == [401, 401, 403, 200]


def test_without_an_admin_key_nobody_is_an_operator():
    access = Access(ServeConfig(api_key=KEY))
    assert [status_of(access, Role.OPERATOR, key) for key in (None, "wrong", KEY)] == [403, 403, 403]


def test_with_an_admin_key_alone_everything_needs_it():
    access = Access(ServeConfig(admin_key=ADMIN))
    assert [status_of(access, role, ADMIN) for role in Role] == [200, 200, 200]
    assert [status_of(access, role) for role in Role] == [200, 401, 401]


def test_without_any_key_all_routes_are_open():
    access = Access(ServeConfig())
    assert [status_of(access, role) for role in Role] == [200, 200, 200]


# ---- WebSockets ---------------------------------------------------------------------------------------------------


async def test_a_websocket_by_header(autojump_clock):
    async with open_clients(**KEYS) as clients:
        headers = [(b"Authorization", b"Bearer " + KEY.encode())]
        async with clients.realtime(extra_headers=headers) as client:
            assert (await client.ask("hello", temperature=0))["status"] == "completed"


async def test_a_websocket_by_subprotocol(autojump_clock):
    """As browsers do, which have no headers; the key is not sent back."""
    async with open_clients(**KEYS) as clients:
        subprotocols = ["realtime", "openai-insecure-api-key." + KEY]
        async with clients.realtime(subprotocols=subprotocols) as client:
            assert client.websocket.subprotocol == "realtime"
            assert KEY.encode() not in b"".join(value for _, value in client.websocket.handshake_headers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"extra_headers": [(b"Authorization", b"Bearer wrong")]},
        {"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]},
        {"subprotocols": ["realtime", "openai-insecure-api-key."]},
        {"subprotocols": [f"openai-insecure-api-key.{KEY}", "openai-insecure-api-key.wrong"]},
        {"subprotocols": [f"openai-insecure-api-key.{KEY}"], "extra_headers": [(b"Authorization", b"Bearer wrong")]},
    ],
    ids=range(6),
)
async def test_a_websocket_without_a_key(autojump_clock, options):
    async with open_clients(**KEYS) as clients:
        with pytest.RaisesGroup(HandshakeError, flatten_subgroups=True) as rejected:
            async with clients.realtime(**options):
                pass
        assert rejected.value.exceptions[0].status_code == 401


async def test_a_key_shows_nowhere(autojump_clock, caplog):
    caplog.set_level(logging.DEBUG, "trioengine")
    async with open_clients(**KEYS) as clients:
        answers = [await clients.http(get("/version?key=" + key, bearer(key))) for key in (KEY, ADMIN, "sk-secret-x")]
        headers = [(b"Authorization", b"Bearer " + KEY.encode())]
        async with clients.realtime(extra_headers=headers) as client:
            await client.ask("hello")
        assert b"secret" not in b"".join(answers)
        assert "secret" not in repr(client.events)
        assert "secret" not in repr(clients.server.config)
    assert "secret" not in caplog.text
    assert "GET /version 400" in caplog.text


async def test_keys_share_nothing_in_the_prefix_cache(autojump_clock):
    """Over WebSocket and HTTP alike; what one key has sent, it finds by both."""
    async with open_clients(**KEYS) as clients:

        async def cached(key):
            async with clients.realtime(extra_headers=[(b"Authorization", b"Bearer " + key.encode())]) as client:
                response = await client.ask("hello", temperature=0)
            return response["usage"]["input_token_details"]["cached_tokens"]

        assert (await cached(KEY), await cached(OTHER), await cached(ADMIN)) == (0, 0, 0)
        assert await cached(KEY) > 0
        answer = await clients.request("POST", CHAT, chat(), authorization=f"Bearer {OTHER}")
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


# ---- so many of a key ---------------------------------------------------------------------------------------------


async def test_so_many_of_a_key(autojump_clock):
    """A WebSocket and a request count alike; others are not concerned, and what ended counts no more."""
    async with open_clients(max_sessions_per_key=1, **KEYS) as clients:
        mine = {"extra_headers": [(b"Authorization", b"Bearer " + KEY.encode())]}
        async with clients.realtime(**mine):
            data = await clients.http(get("/version", bearer(KEY)))
            status, body = status_and_body(data)
            assert (status, code_of(body), body["error"]["type"]) == (429, "too_many_sessions", "rate_limit_error")
            assert b"retry-after: 1\r\n" in data
            with pytest.RaisesGroup(HandshakeError, flatten_subgroups=True) as rejected:
                async with clients.realtime(**mine):
                    pass
            assert rejected.value.exceptions[0].status_code == 429
            assert status_and_body(await clients.http(get("/version", bearer(OTHER))))[0] == 200
            assert status_and_body(await clients.http(get("/health", bearer(KEY))))[0] == 200
        await clients.http(get("/health"))  # time for the goodbye
        assert status_and_body(await clients.http(get("/version", bearer(KEY))))[0] == 200
        assert not clients.server.connections._access._sessions


async def test_a_request_whose_body_still_comes_counts(autojump_clock):
    async with open_clients(max_sessions_per_key=1, **KEYS) as clients:
        stream = clients.stream()
        await stream.send_all(get("/version", bearer(KEY), "Content-Length: 2"))
        await wait_all_tasks_blocked()
        assert status_and_body(await clients.http(get("/version", bearer(KEY))))[0] == 429
        await stream.send_all(b"{}")
        assert status_and_body(await read_all(stream))[0] == 200
        assert status_and_body(await clients.http(get("/version", bearer(KEY))))[0] == 200


def test_an_operator_is_never_one_too_many():
    access = Access(ServeConfig(max_sessions_per_key=1, **KEYS))
    headers = ((b"host", b"localhost"), (b"authorization", b"Bearer " + ADMIN.encode()))
    with access.admit(HttpRequest("GET", "/x", "", headers), Role.USER):
        assert status_of(access, Role.USER, ADMIN) == 429
        assert status_of(access, Role.OPERATOR, ADMIN) == 200


async def test_without_a_key_nobody_is_counted(autojump_clock):
    async with open_clients(max_sessions_per_key=1) as clients, clients.realtime(), clients.realtime():
        assert status_and_body(await clients.http(get("/version")))[0] == 200


# ---- from where ---------------------------------------------------------------------------------------------------

SITE = "https://example.com"
WITH_A_KEY = [
    ("api.example.org:8000", None, 200),
    ("api.example.org:8000", "http://api.example.org:8000", 200),
    ("api.example.org", SITE, 200),
    ("api.example.org:8000", "http://api.example.org", 403),
    ("api.example.org", "https://example.com.evil.org", 403),
    ("api.example.org", "null", 403),
    ("localhost:8000", "http://localhost:3000", 403),
    ("[::1]", "http://[::1]", 200),
]


@pytest.mark.parametrize(("host", "origin", "status"), WITH_A_KEY)
async def test_with_a_key_any_host_and_known_origins(autojump_clock, host, origin, status):
    async with open_clients(allowed_origin=SITE, **KEYS) as clients:
        origins = [] if origin is None else [f"Origin: {origin}"]
        answered, body = status_and_body(await clients.http(get("/version", bearer(KEY), *origins, host=host)))
        assert answered == status
        if status == 403:
            assert code_of(body) == "forbidden"


async def test_an_origin_may_be_allowed_without_a_key(autojump_clock):
    """It is the user who says so; the Host must still be this machine."""
    async with open_clients(allowed_origin=SITE) as clients:
        assert status_and_body(await clients.http(get("/version", f"Origin: {SITE}")))[0] == 200
        assert status_and_body(await clients.http(get("/version", "Origin: https://evil.org")))[0] == 403
        assert status_and_body(await clients.http(get("/version", f"Origin: {SITE}", host="evil.org")))[0] == 403


async def test_insecure_asks_for_nothing_and_keys_for_a_key(autojump_clock):
    page = ("Origin: https://evil.org",)
    async with open_clients(insecure=True) as clients:
        assert status_and_body(await clients.http(get("/version", *page, host="evil.net")))[0] == 200
    async with open_clients(**KEYS) as clients:
        assert status_and_body(await clients.http(get("/version", host="evil.net")))[0] == 401
        assert status_and_body(await clients.http(get("/version", *page, bearer(KEY), host="evil.net")))[0] == 403


async def test_a_server_without_keys_ignores_a_key(autojump_clock, clients):
    assert status_and_body(await clients.http(get("/version", bearer("any"))))[0] == 200
    async with clients.realtime(extra_headers=[(b"Authorization", b"Bearer any")]) as client:
        await client.ask("hello")


PREFLIGHT = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization,x-stainless-os")


async def test_a_preflight(autojump_clock):
    """It brings no key, and needs none; the connection lives."""
    async with open_clients(allowed_origin=("https://other.org", SITE), **KEYS) as clients:
        asked = get("/version", f"Origin: {SITE}", *PREFLIGHT, method="OPTIONS")
        data = await clients.http(asked + get("/health"))
        assert data.startswith(b"HTTP/1.1 200 ")
        for line in (
            b"access-control-allow-origin: https://example.com",
            b"access-control-allow-methods: GET, HEAD",
            b"access-control-allow-headers: authorization,x-stainless-os",
            b"vary: origin",
        ):
            assert line in data.lower().replace(b"get, head", b"GET, HEAD")
        assert data.count(b"HTTP/1.1 200 ") == 2


async def test_a_preflight_for_a_header_with_control_characters(autojump_clock):
    """They are allowed in the value of a header; the response repeats it."""
    asked = (f"Origin: {SITE}", "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: a\1b")
    async with open_clients(allowed_origin=SITE, **KEYS) as clients:
        data = await clients.http(get("/version", *asked, method="OPTIONS"))
    assert data.startswith(b"HTTP/1.1 200 ")
    assert b"access-control-allow-headers: a\1b\r\n" in data


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Origin: https://evil.org", *PREFLIGHT), 403),
        (("Origin: http://localhost", *PREFLIGHT), 401),
        (PREFLIGHT, 401),
        ((f"Origin: {SITE}",), 401),
    ],
)
async def test_what_is_no_preflight(autojump_clock, headers, status):
    async with open_clients(allowed_origin=SITE, **KEYS) as clients:
        data = await clients.http(get("/version", *headers, method="OPTIONS"))
        assert status_and_body(data)[0] == status
        assert b"access-control-allow-methods" not in data


async def test_pages_of_allowed_origins_may_read(autojump_clock):
    """Also that their key is wrong; nobody else may, and caches are told that it depends."""
    async with open_clients(allowed_origin=SITE, **KEYS) as clients:
        for key, status in ((KEY, 200), ("wrong", 401)):
            data = await clients.http(get("/version", f"Origin: {SITE}", bearer(key)))
            assert status_and_body(data)[0] == status
            assert b"access-control-allow-origin: https://example.com\r\n" in data
            assert b"access-control-expose-headers: x-request-id, retry-after, x-unknown-fields\r\n" in data
        for origin in ("https://evil.org", "http://localhost"):
            data = await clients.http(get("/version", f"Origin: {origin}", bearer(KEY)))
            assert b"access-control" not in data
            assert b"vary: origin\r\n" in data


async def test_without_a_key_pages_of_this_machine_may_read(autojump_clock, clients):
    page = "http://127.0.0.1:8081"
    for path, status in (("/version", 200), ("/nothing", 404)):
        data = await clients.http(get(path, f"Origin: {page}"))
        assert status_and_body(data)[0] == status
        assert f"access-control-allow-origin: {page}\r\n".encode() in data
        assert b"vary: origin\r\n" in data
    data = await clients.http(get("/version", f"Origin: {page}", *PREFLIGHT, method="OPTIONS"))
    assert b"access-control-allow-methods: GET, HEAD\r\n" in data
    for origin in ("https://evil.org", "null"):
        assert b"access-control" not in await clients.http(get("/version", f"Origin: {origin}"))
