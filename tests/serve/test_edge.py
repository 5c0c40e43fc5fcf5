"""The edge of a server: the names in Host, a prefix before its routes, and the pages of other sites."""

import json

import pytest
from helpers.clients import CHAT, chat, open_clients

HOSTS = [
    ({}, "localhost:9", 200),
    ({}, "[::1]", 200),
    ({}, "example.com", 403),
    ({"allowed_host": "example.com"}, "EXAMPLE.com:81", 200),
    ({"allowed_host": "example.com"}, "localhost", 200),
    ({"allowed_host": "example.com"}, "evil.com", 403),
    ({"allowed_host": "[::a]"}, "[::A]:80", 200),
    ({"allowed_host": "FE80:0:0:0:0:0:0:A"}, "[fe80::a]", 200),
    ({"allowed_host": "fe80::a"}, "[FE80:0::0A]", 200),
    ({"allowed_host": "fe80::a"}, "[fe80::b]", 403),
    ({"api_key": "k" * 16}, "example.com", 200),
    ({"api_key": "k" * 16, "host": "0.0.0.0", "allowed_host": "example.com"}, "localhost", 403),
    ({"insecure": True, "allowed_host": ("a.com", "b.com")}, "b.com", 200),
    ({"insecure": True, "allowed_host": ("a.com", "b.com")}, "c.com", 403),
]


@pytest.mark.parametrize(("options", "host", "status"), HOSTS)
async def test_the_host_of_a_request(autojump_clock, options, host, status):
    async with open_clients(**options) as clients:
        assert (await clients.request("GET", "/health", host=host)).status == status


async def test_a_page_of_an_allowed_host_may_use_it_without_a_key(autojump_clock):
    async with open_clients(allowed_host="example.com") as clients:
        own = await clients.request("POST", CHAT, chat(), host="example.com", origin="https://example.com")
        other = await clients.request("POST", CHAT, chat(), host="example.com", origin="https://evil.com")
        assert (own.status, other.status) == (200, 403)


@pytest.mark.parametrize("origin", ["https://evil.com", "null"])
async def test_a_simple_post_of_another_site_runs_no_route(autojump_clock, clients, origin):
    headers = {"origin": origin, "content-type": "text/plain"}
    for path in ("/sleep", "/abort_request", CHAT):
        assert (await clients.request("POST", path, b"{}", **headers)).status == 403
    assert clients.engine.state.value == "awake"


async def test_a_page_of_this_machine_may_use_a_server_without_a_key(autojump_clock, clients):
    origin = {"origin": "http://localhost:5173"}
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    for answer in (
        await clients.request("OPTIONS", CHAT, **origin, **wanted),
        await clients.request("POST", CHAT, chat(), **origin),
    ):
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, origin["origin"])
    async with clients.realtime(extra_headers=[(b"origin", b"http://127.0.0.1:5173")]) as client:
        assert (await client.ask("hello", max_output_tokens=3))["status"] == "incomplete"


async def test_routes_are_served_with_and_without_the_prefix(autojump_clock):
    async with open_clients(root_path="/a/llm") as clients:
        for path in ("/version", "/a/llm/version", "/a/llm", "/a/llm/"):
            assert (await clients.request("GET", path)).status == 200
        for path in ("/a/llmversion", "/a/version"):
            assert (await clients.request("GET", path)).status == 404
        async with clients.realtime(path="/a/llm/v1/realtime"):
            pass
        document = json.loads((await clients.request("GET", "/openapi.json")).body)
        assert document["servers"] == [{"url": "/a/llm"}]
        home = (await clients.request("GET", "/", accept="text/html")).body.decode()
        assert 'href="/a/llm/docs"' in home and "http://localhost/a/llm/v1" in home


async def test_a_prefix_that_begins_routes_hides_none(autojump_clock):
    async with open_clients(root_path="/v1") as clients:
        for path in ("/v1/models", "/v1/v1/models", "/version", "/v1/version"):
            assert (await clients.request("GET", path)).status == 200
