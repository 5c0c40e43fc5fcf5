"""Names that a client got wrong: a field, a parameter, a route, a method. The error has the nearest, or the list."""

import pytest
from helpers.clients import CHAT, chat, open_clients, status_and_body
from helpers.frames import HANDSHAKE

UNKNOWN = [
    ("max_token", "; did you mean 'max_tokens'?"),
    ("temp", "; did you mean 'temperature'?"),
    ("system", "; did you mean 'messages'?"),
    ("input", "; did you mean 'messages'?"),
    ("thinking", ""),
]


@pytest.mark.parametrize(("name", "hint"), UNKNOWN)
async def test_an_unknown_field(autojump_clock, caplog, name, hint):
    """The log has the hint, or the refusal if such fields are refused."""
    async with open_clients() as clients, open_clients(unknown_fields="refuse") as strict:
        assert (await clients.chat(**{name: 5})).status == 200
        assert [record.getMessage() for record in caplog.records] == [
            f"clients send the field {name!r}, which has no effect here{hint}"
        ]
        answer = await strict.chat(**{name: 5})
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", name)
        assert answer.error["message"] == f"unknown field {name!r}{hint}"


OF_OPERATORS = [
    ("/update_weights", {"nam": "x"}, "nam", "name"),
    ("/abort_request", {"requestid": "x"}, "requestid", "request_id"),
]


@pytest.mark.parametrize(("path", "body", "given", "meant"), OF_OPERATORS)
async def test_an_unknown_field_of_an_operator(autojump_clock, clients, path, body, given, meant):
    answer = await clients.request("POST", path, body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unsupported_parameter", given)
    assert answer.error["message"] == f"unknown field {given!r}; did you mean {meant!r}?"


MISSPELT = [
    (CHAT, chat(messages=[{"role": "user", "contents": "x"}]), "messages[0].content", "contents"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "text", "txt": ""}]}]),
        "messages[0].content[0].text",
        "txt",
    ),
    ("/detokenize", {"token": [1]}, "tokens", "token"),
]


@pytest.mark.parametrize(("path", "body", "missing", "given"), MISSPELT, ids=range(len(MISSPELT)))
async def test_a_required_field_that_is_misspelt(autojump_clock, clients, path, body, missing, given):
    answer = await clients.request("POST", path, body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "missing_parameter", missing)
    assert answer.error["message"] == f"{missing} is missing; did you mean it by {given!r}?"


FIXED = [
    ({"functions": [{"name": "f"}]}, "this server does not support functions"),
    ({"echo": True}, "echo must be false, got true"),
    ({"best_of": 2}, "best_of must be 1, got 2"),
    ({"best_of": True}, "best_of must be 1, got true"),
    ({"function_call": "f"}, 'function_call must be "none" or "auto", got "f"'),
    ({"best_of": "ü" * 90}, f'best_of must be 1, got "{"ü" * 78}…'),
]


@pytest.mark.parametrize(("fields", "message"), FIXED, ids=range(len(FIXED)))
async def test_a_field_with_a_value_that_is_not_supported(autojump_clock, clients, fields, message):
    answer = await clients.request("POST", CHAT, chat(**fields))
    assert (answer.status, answer.error["code"]) == (400, "unsupported_parameter")
    assert answer.error["message"] == message


HELLO = {"role": "user", "content": "x"}
VALUES = [
    ({"temperature": True}, "temperature must be a number from 0 to 100, got true"),
    ({"stop": {"a": None}}, 'stop must be a string or a list of at most 16 entries, got {"a": null}'),
    ({"max_tokens": "x"}, 'max_tokens must be an integer from 1 to 2147483647, got "x"'),
    ({"stream": "yes"}, 'stream must be true or false, got "yes"'),
    ({"reasoning_effort": "high"}, 'reasoning_effort must be "none" for this model, got "high"'),
    ({"messages": [{**HELLO, "name": 5}]}, "messages[0].name must be a string, got 5"),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content must be a string or a list of at least 1 entries, got 5",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
]


@pytest.mark.parametrize(("fields", "message"), VALUES, ids=range(len(VALUES)))
async def test_a_refused_value_is_shown_as_json(autojump_clock, clients, fields, message):
    answer = await clients.request("POST", CHAT, chat(**fields))
    assert (answer.status, answer.error["message"]) == (400, message)


async def test_parameters_of_no_effect_are_taken(autojump_clock, clients):
    answer = await clients.request("POST", CHAT, chat(parallel_tool_calls=False, reasoning_effort="none"))
    assert answer.status == 200


async def test_an_unknown_field_that_resembles_none_lists_them(autojump_clock, clients):
    answer = await clients.request("POST", "/abort_request", {"id": "x"})
    assert answer.error["message"] == "unknown field 'id'; the fields are abort_all, request_id"


async def test_an_event_without_a_type(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.websocket.send_message("{}")
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unknown_event", "type")
        assert error["message"].startswith("type is missing; it must be one of session.update, ")


PARAMETERS = [
    ("/sleep?levle=1", "unknown parameter 'levle'; did you mean 'level'?"),
    ("/wake_up?tag=weights", "unknown parameter 'tag'; did you mean 'tags'?"),
    ("/sleep?x=1", "unknown parameter 'x'; the parameters are level, mode, timeout"),
]


@pytest.mark.parametrize(("target", "message"), PARAMETERS)
async def test_an_unknown_parameter(autojump_clock, clients, target, message):
    answer = await clients.request("POST", target)
    assert (answer.status, answer.error["message"]) == (400, message)


async def test_no_route_ignores_a_parameter(autojump_clock, clients):
    routes = clients.server.connections._routes
    assert {"/", "/health", "/metrics", "/v1/models", CHAT, "/tokenize", "/is_sleeping", "/sleep"} <= routes.keys()
    for path, route in routes.items():
        for method in route.handlers.keys() - {"HEAD"}:
            answer = await clients.request(method, f"{path.replace('*', 'toy')}?xyzzy=", None)
            parameters = sorted(route.operation.parameters)
            listed = f"; the parameters are {', '.join(parameters)}" if parameters else ""
            assert (answer.status, answer.error["message"]) == (400, f"unknown parameter 'xyzzy'{listed}"), path
            assert (answer.error["code"], answer.error["param"]) == ("unsupported_parameter", "xyzzy")


async def test_an_unknown_parameter_of_a_handshake(autojump_clock, clients):
    data = await clients.http(HANDSHAKE.replace(b"/v1/realtime", b"/v1/realtime?modl=toy"))
    status, body = status_and_body(data)
    assert (status, body["error"]["message"]) == (400, "unknown parameter 'modl'; did you mean 'model'?")


EVENTS = [
    ("response.create", {"respons": {}}, "respons", "; did you mean 'response'?"),
    (
        "response.create",
        {"response": {"max_tokens": 5}},
        "response.max_tokens",
        "; did you mean 'response.max_output_tokens'?",
    ),
    (
        "response.create",
        {"response": {"maxTokens": 5}},
        "response.maxTokens",
        "; did you mean 'response.max_output_tokens'?",
    ),
    ("response.create", {"response": {"inputs": []}}, "response.inputs", "; did you mean 'response.input'?"),
    (
        "session.update",
        {"session": {"temperatur": 1}},
        "session.temperatur",
        "; did you mean 'session.temperature'?",
    ),
    ("session.update", {"session": {"xyzzy": 1}}, "session.xyzzy", ""),
]


@pytest.mark.parametrize(("name", "fields", "path", "hint"), EVENTS, ids=range(len(EVENTS)))
async def test_an_unknown_field_of_an_event(autojump_clock, caplog, name, fields, path, hint):
    """The log has the hint, or the refusal if such fields are refused."""
    async with open_clients() as clients, clients.realtime() as client:
        await client.say("hello")
        for _ in range(2):
            await client.send(name, **fields)
            await client.until("session.updated" if name == "session.update" else "response.done")
    assert [record.getMessage() for record in caplog.records] == [
        f"clients send the field {path!r}, which has no effect here{hint}"
    ]
    async with open_clients(unknown_fields="refuse") as clients, clients.realtime() as client:
        await client.send(name, **fields)
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", path)
        assert error["message"] == f"unknown field {path!r}{hint}"


async def test_a_required_member_of_an_item_that_is_misspelt(autojump_clock, clients):
    async with clients.realtime() as client:
        await client.send("conversation.item.create", item={"type": "message", "rol": "user", "content": []})
        error = (await client.until("error"))["error"]
        assert (error["code"], error["param"]) == ("invalid_value", "item.content")
        item = {"type": "message", "rol": "user", "content": [{"type": "input_text", "text": "x"}]}
        await client.send("conversation.item.create", item=item)
        error = (await client.until("error"))["error"]
        assert error["message"] == "item.role is missing; did you mean it by 'rol'?"


ROUTES = [
    ("/chat/completions", "/v1/chat/completions"),
    ("/v1/complete", "/v1/completions"),
    ("/tokenise", "/tokenize"),
    ("/v1/real-time", "/v1/realtime"),
]


@pytest.mark.parametrize(("path", "meant"), ROUTES)
async def test_an_unknown_route(autojump_clock, clients, path, meant):
    answer = await clients.request("POST", path, {})
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"] == f"no route {path!r}; did you mean {meant!r}?"


async def test_a_route_that_is_like_no_other(autojump_clock, clients):
    answer = await clients.request("GET", "/" + "x" * 5000)
    beginning, _, listed = answer.error["message"].partition("; the routes are ")
    assert (answer.status, beginning) == (404, f"no route '/{'x' * 79}'")
    routes = listed.split(", ")
    assert {"/", CHAT, "/v1/models", "/v1/realtime", "/tokenize", "/health", "/metrics"} <= set(routes)
    assert routes == sorted(routes)


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", CHAT, "POST"), ("POST", "/version", "GET, HEAD")])
async def test_a_method_that_is_not_allowed(autojump_clock, clients, method, path, allowed):
    answer = await clients.request(method, path)
    assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "method_not_allowed", allowed)
    assert answer.error["message"] == f"method {method} is not allowed for {path}; allowed: {allowed}"
