"""Requests other than for an answer, each with the response that docs/http.md promises."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trioengine import __version__
from trioengine.actors.power_change import PowerState
from trioengine.testing.fuzz import shapes
from trioengine.testing.fuzz.conversations import prompt_ids
from trioengine.testing.fuzz.faults import Harm, InjectedFaults, Life
from trioengine.testing.fuzz.http_books import ADMIN_KEY, KEYS, Metrics, Request
from trioengine.testing.fuzz.http_exchange import Judge
from trioengine.testing.fuzz.shapes import Head, has_fields

CHAT = "/v1/chat/completions"
JSON, TEXT, HTML = "application/json", "text/plain; charset=utf-8", "text/html; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
MESSAGES = [{"role": "user", "content": "a"}]
STATES = {  # of /ready, and the harm that makes them; a worker may load at any time before the first is ready
    "awake": (),
    "loading": (),
    "restarting": (Harm.WORKERS, Harm.SLEEP),
    "asleep": (Harm.SLEEP,),
    "draining": (Harm.CLOSING,),
    "closed": (Harm.CLOSING, Harm.WORKERS),
}
POWERS = ("awake", "falling_asleep", "asleep", "waking", "updating", "loading", "restarting", "draining", "closed")


@dataclass(frozen=True)
class Probe:
    """A request, and the response to it: a status, and a check of its body, or the code and the param of an error."""

    request: Request
    status: int = 200
    code: str | None = None
    param: str | None = None
    check: Callable[[Any], None] | None = None
    content_type: str = JSON
    headers: Mapping[bytes, str] | None = None  # that the response must have
    needs_model: bool = False  # it is refused until the first worker is ready

    def judge_early(self, head: Head, body: bytes, life: Life) -> bool:
        """The same while the model may be unknown."""
        if self.needs_model and head.status == 503:
            return bool(shapes.check_problem(json.loads(body)["error"], head)["code"] == "overloaded")
        return self.judge(head, body, life)

    def judge(self, head: Head, body: bytes, life: Life) -> bool:
        """Whether it is the expected response, whose body is checked; False if it may be another error."""
        if head.status != self.status:
            return False
        if self.code is not None:
            error = shapes.check_problem(has_fields(json.loads(body), ("error",), "the body")["error"], head)
            if error["code"] != self.code:
                return False
            assert error["param"] == self.param, f"the error is about {self.param}, and it is {error}"
        shapes.check_head(head, self.content_type, None)
        for name, value in (self.headers or {}).items():
            assert head.value(name) == value, f"the header {name.decode()} is {head.value(name)}, and not {value}"
        if self.request.method == "HEAD":
            assert not body, f"a HEAD is answered by {body!r}"
        elif self.check is not None:
            self.check(json.loads(body) if self.content_type == JSON else body.decode())
        return True


def _get(target: str, key: str | None = KEYS[0], **more: Any) -> Probe:
    return Probe(Request("GET", target, b"", key), **more)


def _post(target: str, body: object, **more: Any) -> Probe:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Probe(Request("POST", target, data, KEYS[0]), **more)


def _equals(expected: object) -> Callable[[Any], None]:
    def check(found: Any) -> None:
        assert found == expected, f"the body is {found}, and not {expected}"

    return check


def _check_models(found: Any) -> None:
    has_fields(found, ("object", "data"), "the list")
    assert found["object"] == "list" and len(found["data"]) == 1, f"the models are {found}"
    _check_model(found["data"][0])


def _check_model(found: Any) -> None:
    fields = ("id", "object", "created", "owned_by", "parent", "max_model_len", "default_sampling_params")
    has_fields(found, fields, "a model")
    assert found["parent"] is None, f"the model is not an adapter: {found}"
    assert found["default_sampling_params"] == {}, f"the model has no defaults: {found}"
    named = found["id"], found["object"], found["owned_by"], found["max_model_len"] in (None, 96)
    assert named == ("toy", "model", "trioengine", True), f"the model is {found}"


def _check_page(found: str) -> None:
    assert found.startswith("<!doctype html>") and found.endswith("</html>"), f"the page is {found}"
    assert not any(key in found for key in (*KEYS, ADMIN_KEY)), "the page has a key"


def _check_description(found: Any) -> None:
    has_fields(found, ("openapi", "info", "servers", "tags", "paths", "components"), "the description")
    assert {CHAT, "/", "/docs", "/openapi.json"} <= set(found["paths"]), f"the paths are {set(found['paths'])}"


def check_state(found: Any) -> None:
    """The body of /is_sleeping, and of each change of power."""
    has_fields(found, ("is_sleeping", "level", "tags", "power", "weight_version"), "the state")
    told = found["is_sleeping"], bool(found["tags"]), found["level"] is not None
    assert len(set(told)) == 1, f"the state is {found}"
    assert found["level"] in (None, 1, 2) and found["power"] in POWERS, f"the state is {found}"
    assert set(found["tags"]) <= {"kv_cache", "weights"} and found["weight_version"] == 1, f"the state is {found}"


def check_changed(found: Mapping[str, Any], target: str) -> None:
    """The state after this change, when there was no other."""
    path, _, query = target.partition("?")
    tags, power = found["tags"], found["power"]
    if path == "/sleep":
        level = 2 if "level=2" in query else 1
        assert (tags, found["level"]) == (["kv_cache", "weights"], level), f"after {target} the state is {found}"
    elif "tags=" in query:
        assert query.partition("tags=")[2] not in tags, f"after {target} the state is {found}"
    else:
        assert set(tags) <= ({"weights"} if "reload=false" in query else set()), f"after {target} the state is {found}"
    assert power == ("asleep" if tags else "awake"), f"after {target} the state is {found}"


def _bad(body: object, code: str, param: str | None, **more: Any) -> Probe:
    return _post(CHAT, body, **{"status": 400, "code": code, "param": param, **more})


def _bad_field(param: str, code: str, status: int = 400, **fields: Any) -> Probe:
    return _bad({"messages": MESSAGES, **fields}, code, param, status=status)


def _counts(*token_ids: int, strings: list[str] | None = None) -> Callable[[Any], None]:
    tokens = list(token_ids)
    return _equals({"count": len(tokens), "max_model_len": 96, "tokens": tokens, "token_strs": strings})


_RENDERED = list(prompt_ids((("user", "a"),)))
PROBES: Mapping[str, Probe] = {
    "home": _get("/", None, content_type=TEXT),
    "page": Probe(Request("GET", "/", accept="text/html,*/*;q=0.8"), content_type=HTML, check=_check_page),
    "docs": _get("/docs", None, content_type=HTML, check=_check_page),
    "description": _get("/openapi.json", None, check=_check_description),
    "other header of a key": Probe(
        Request("GET", "/version", key=KEYS[0], key_header="x-api-key"), check=_equals({"version": __version__})
    ),
    "version": _get("/version", check=_equals({"version": __version__})),
    "models": _get("/v1/models", check=_check_models),
    "model": _get("/v1/models/toy", check=_check_model),
    "another model": _get("/v1/models/other", status=404, code="model_not_found", param="model"),
    "head": Probe(Request("HEAD", "/v1/models", b"", KEYS[0])),
    "options": Probe(
        Request("OPTIONS", "/v1/models", b"", KEYS[0]), 405, "method_not_allowed", headers={b"allow": "GET, HEAD"}
    ),
    "wrong method": _get(CHAT, status=405, code="method_not_allowed", headers={b"allow": "POST"}),
    "no route": _get("/nothing", status=404, code="not_found"),
    "query": _get("/version?x=1", status=400, code="unsupported_parameter", param="x"),
    "no websocket": _get("/v1/realtime", status=426, code="upgrade_required", headers={b"upgrade": "websocket"}),
    "no key": _get("/version", None, status=401, code="invalid_api_key", headers={b"www-authenticate": "Bearer"}),
    "wrong key": _get("/version", "key-z", status=401, code="invalid_api_key"),
    "no operator": _get("/is_sleeping", status=403, code="admin_key_required"),
    "tokens": _post("/tokenize", {"prompt": "be"}, needs_model=True, check=_counts(98, 101)),
    "strings": _post(
        "/tokenize",
        {"prompt": "be", "return_token_strs": True},
        needs_model=True,
        check=_counts(98, 101, strings=["b", "e"]),
    ),
    "rendered": _post("/tokenize", {"messages": MESSAGES}, needs_model=True, check=_counts(*_RENDERED)),
    "text": _post(
        "/detokenize", {"tokens": [98, 258, 101]}, needs_model=True, check=_equals({"prompt": "b<|im_end|>e"})
    ),
    "no such token": _post(
        "/detokenize", {"tokens": [98, 999]}, needs_model=True, status=400, code="invalid_value", param="tokens[1]"
    ),
    "no json": _bad(b"{", "invalid_json", None),
    "no utf-8": _bad(b"\xff", "invalid_json", None),
    "no object": _bad([], "invalid_type", None),
    "no messages": _bad({}, "missing_parameter", "messages"),
    "empty messages": _bad({"messages": []}, "invalid_value", "messages"),
    "wrong role": _bad({"messages": [{"role": "x", "content": "a"}]}, "invalid_value", "messages[0].role"),
    "no content": _bad({"messages": [{"role": "user"}]}, "missing_parameter", "messages[0].content"),
    "unknown field": _post(
        "/tokenize",
        {"prompt": "be", "mood": 1},
        needs_model=True,
        check=_counts(98, 101),
        headers={b"x-unknown-fields": "mood"},
    ),
    "unknown field of an operator": Probe(
        Request("POST", "/abort_request", b'{"requestid": "x"}', ADMIN_KEY), 400, "unsupported_parameter", "requestid"
    ),
    "too hot": _bad_field("temperature", "invalid_value", temperature=101),
    "a text for a number": _bad_field("max_tokens", "invalid_type", max_tokens="1"),
    "too many choices": _bad_field("n", "invalid_value", n=17),
    "no stream": _bad_field("stream_options", "invalid_value", stream_options={"include_usage": True}),
    "odd option": _bad_field(
        "stream_options.include_obfuscation",
        "unsupported_parameter",
        stream=True,
        stream_options={"include_obfuscation": True},
    ),
    "no logprobs": _bad_field("top_logprobs", "invalid_value", top_logprobs=1),
    "empty id": _bad_field("request_id", "invalid_value", request_id=""),
    "other model": _bad_field("model", "model_not_found", 404, model="other"),
    "no id": Probe(Request("POST", "/abort_request", b"{}", ADMIN_KEY), 400, "invalid_value", "request_id"),
    "no level": Probe(Request("POST", "/sleep?level=3", b"", ADMIN_KEY), 400, "invalid_value", "level"),
    "no weights": Probe(Request("POST", "/update_weights", b'{"name": "x"}', ADMIN_KEY), 403, "no_weights_dir"),
    "too long": _bad(b"{" + b" " * 1500, "body_too_large", None, status=413),
}


# ---- the state of the engine ----------------------------------------------------------------------------------------

HEALTH, READY, SCRAPE = Request("GET", "/health"), Request("GET", "/ready"), Request("GET", "/metrics", b"", KEYS[0])
SLEEPING = Request("GET", "/is_sleeping", b"", ADMIN_KEY)
INVARIANTS = Request("GET", "/debug/invariants", b"", ADMIN_KEY)


class StateJudge:
    """Judges the state that one server reports; `last` are the metrics of the latest scrape.

    `steady` returns the engine's state if nothing may have changed it since a life began.
    """

    def __init__(self, faults: InjectedFaults, steady: Callable[[Life], PowerState | None]) -> None:
        self.last: Metrics | None = None
        self._faults = faults
        self._steady = steady

    def health(self, head: Head, body: bytes, life: Life) -> bool:
        shapes.check_head(head, JSON, None)
        status = has_fields(json.loads(body), ("status",), "the health")["status"]
        is_bad = status in ("closed", "unresponsive") and self._faults.hit(life, Harm.WORKERS, Harm.CLOSING)
        assert status == "ok" or is_bad, f"the engine is well, and its health is {status}"
        assert (head.status == 200) == (status == "ok"), f"the health is {head.status} {status}"
        return True

    def ready(self, head: Head, body: bytes, life: Life) -> bool:
        shapes.check_head(head, JSON, None)
        state = has_fields(json.loads(body), ("state",), "the readiness")["state"]
        assert (head.status == 200) == (state == "awake"), f"the readiness is {head.status} {state}"
        harms = STATES[state]
        assert not harms or self._faults.hit(life, *harms), f"nothing has happened, and the engine is {state}"
        if (steady := self._steady(life)) is not None:
            due = "asleep" if steady.asleep else "awake"
            assert state == due, f"the engine is {steady}, and its readiness {state}"
        return True

    def sleeping(self, head: Head, body: bytes, life: Life) -> bool:
        if head.status != 200:
            return False
        shapes.check_head(head, JSON, None)
        found = json.loads(body)
        check_state(found)
        if (steady := self._steady(life)) is not None:
            told = found["tags"], found["level"]
            due = sorted(tag.value for tag in steady.asleep), steady.level
            assert told == due, f"asleep are {due}, and the state is {found}"
        return True

    def invariants(self, head: Head, body: bytes, life: Life) -> bool:
        shapes.check_head(head, JSON, None)
        found = json.loads(body)
        if head.status == 200:
            has_fields(found, ("ok", "statistics", "tasks"), "the invariants")
            assert found["ok"] is True, f"the invariants are {found}"
            return True
        error = shapes.check_problem(found["error"], head)
        assert head.status == 503, f"the books do not balance: {error}"
        return True

    def scraping(self) -> Judge:
        """Judge a scrape that is sent now: nothing may have decreased since the latest one that has come."""
        before = self.last

        def judge(head: Head, body: bytes, life: Life) -> bool:
            if head.status != 200:
                return False
            shapes.check_head(head, METRICS, None)
            self.last = Metrics.parse(body.decode())
            self.last.check(before)
            return True

        return judge
