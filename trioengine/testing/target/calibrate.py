"""Measures a server before the search: its dialect, model, speed, golden answer and gauges at rest; without I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trioengine.testing.target.dialects import DIALECTS, OPENAI, SIGNS, Dialect
from trioengine.testing.target.exchange import GOLDEN_PROMPT, GOLDEN_TOKENS, Exchange, Target, prompt_of
from trioengine.testing.target.oracles import Golden
from trioengine.testing.target.program import RULES
from trioengine.testing.target.wire import (
    Action,
    Answer,
    Close,
    Connect,
    Leave,
    Now,
    Response,
    Send,
    Signal,
    Wait,
    answer_of,
    json_of,
)

REPEATS = 3
CROWD = 3  # streams beside the golden prompt
LEAST, MOST = 10.0, 90.0  # seconds: bounds of the deadline
PATIENCE = 120.0  # seconds for the first answers, and for a server to load its model
SLOWDOWN = 20  # the deadline, in answers to the golden prompt
LONG = 1.0  # seconds: the search sends no request that takes longer alone, so that there is time for many programs


class NoTarget(Exception):
    """The server cannot be fuzzed; the message is the reason."""


def detect(target: Target) -> Action[Dialect]:
    """Find the dialect by its metrics, or by routes that one kind of server has."""
    exchange = Exchange(target)
    page = yield from _once_loaded(target, lambda: exchange.fetch("GET", "/metrics", None, PATIENCE))
    if page.status is None:
        state = "accepts connections, but does not answer" if page.end is None else "does not answer"
        raise NoTarget(f"{target.host} {state}")
    text = page.body.decode("utf-8", "replace")
    for sign, name in SIGNS.items():
        if re.search(f"^{sign}", text, re.MULTILINE):
            return DIALECTS[name]
    server = page.headers.get("server", "").lower()
    for name in DIALECTS:
        if name in server:
            return DIALECTS[name]
    props = yield from exchange.fetch("GET", "/props", None, PATIENCE)
    if props.status == 200 and b"total_slots" in props.body:
        return DIALECTS["llama.cpp"]
    return OPENAI


def calibrate(target: Target, model: str | None = None) -> Action[Target]:
    """Return the target with everything that the oracles compare with. Raises NoTarget."""
    exchange = Exchange(target)
    target.model = model or (yield from _first_model(exchange))
    yield from _once_loaded(target, lambda: exchange.complete(GOLDEN_PROMPT, 1, PATIENCE))
    slowest, fastest = 0.0, PATIENCE
    answers: list[Answer] = []
    for repeat in range(REPEATS):
        begin = yield Now()
        response = yield from exchange.complete(GOLDEN_PROMPT, GOLDEN_TOKENS, PATIENCE)
        if repeat == 0 and response.status in (400, 404) and target.dialect.completions:
            target.kind = "completions"
            response = yield from exchange.complete(GOLDEN_PROMPT, GOLDEN_TOKENS, PATIENCE)
        _check_first(target, response)
        answers.append(answer_of(response))
        seconds = (yield Now()) - begin
        slowest, fastest = max(slowest, seconds), min(fastest, seconds)
    target.deadline = min(MOST, max(LEAST, SLOWDOWN * slowest))
    yield from _measure_pace(exchange, fastest / GOLDEN_TOKENS)
    target.golden = Golden(prompt_tokens=_stable_prompt(answers))
    yield from _find_logprobs(exchange)
    if len({answer.text for answer in answers}) == 1:
        target.golden.text = answers[0].text
        target.golden.in_crowd = yield from _is_stable_in_crowd(exchange, answers[0].text)
    yield from _check_tokenizer(exchange)
    yield from _leave_out_missing(exchange)
    return target


def measure_start(target: Target) -> Action[None]:
    """Kill the worker, and give each deadline room for the start of another one. Raises NoTarget."""
    exchange = Exchange(target)
    begin = yield Now()
    yield Signal("KILL", "worker")
    if not (yield from exchange.is_answered(PATIENCE)):
        raise NoTarget(f"no completion was answered in {PATIENCE:g} s after the death of the worker")
    target.allow_starts((yield Now()) - begin)


def _once_loaded(target: Target, request: Callable[[], Action[Response]]) -> Action[Response]:
    """Repeat a request while the answer is 503, which servers send while they load a model, for PATIENCE in all."""
    if target.load_by is None:
        target.load_by = (yield Now()) + PATIENCE
    response = yield from request()
    while response.status == 503 and (yield Now()) < target.load_by:
        yield Wait(1.0)
        response = yield from request()
    return response


def _first_model(exchange: Exchange) -> Action[str]:
    target = exchange.target
    page = yield from _once_loaded(target, lambda: exchange.fetch("GET", target.dialect.models, None, PATIENCE))
    value = json_of(page.body.decode("utf-8", "replace"))
    models = value.get("data") if isinstance(value, dict) else None
    if page.status is None:
        raise NoTarget(f"{target.host} does not answer")
    if page.status != 200 or not isinstance(models, list) or not models:
        raise NoTarget(f"{target.dialect.models} answers {page.status}, and lists no model: give --model")
    return str(models[0].get("id"))


def _check_first(target: Target, response: Response) -> None:
    if response.status != 200 or not response.ended:
        shown = response.body[:200].decode("utf-8", "replace")
        raise NoTarget(f"{target.host} does not answer a completion before the search: {response.status} {shown}")


def _stable_prompt(answers: list[Answer]) -> int | None:
    counts = {(answer.usage or {}).get("prompt_tokens") for answer in answers}
    return counts.pop() if len(counts) == 1 else None


def _measure_pace(exchange: Exchange, token: float) -> Action[None]:
    """Find the arguments that are small enough for the server's pace; `token` is its time for one, in seconds."""
    words = max(RULES["open"]["words"])
    begin = yield Now()
    yield from exchange.complete(prompt_of("hello", words), 1, PATIENCE)
    prompt = (yield Now()) - begin
    longest = words if prompt < LONG else int(words * LONG / prompt)
    exchange.target.most = {"words": longest, "max_tokens": max(8, int(LONG / max(token, 0.001)))}
    exchange.target.patience = min(LONG, max(0.1, prompt + 5 * token))


def _find_logprobs(exchange: Exchange) -> Action[None]:
    """Use log-probabilities if the server has them."""
    if exchange.target.kind != "chat":
        return
    exchange.target.golden.logprobs = [0.0]  # asks for them
    response = yield from exchange.complete(GOLDEN_PROMPT, GOLDEN_TOKENS, PATIENCE, golden=True)
    exchange.target.golden.logprobs = answer_of(response).logprobs if response.status == 200 else []


def _is_stable_in_crowd(exchange: Exchange, text: str) -> Action[bool]:
    numbers = range(1, CROWD + 1)
    for number in numbers:
        body = exchange.body(f"Write {number} long sentences.", 48, stream=True)
        yield Connect(number)
        yield Send(number, exchange.encode("POST", exchange.route, body), PATIENCE)
    same = True
    for _ in range(2):
        response = yield from exchange.complete(GOLDEN_PROMPT, GOLDEN_TOKENS, PATIENCE, golden=True)
        same = same and answer_of(response).text == text
    for number in numbers:
        yield Leave(number, Close.FIN)
    return same


def _check_tokenizer(exchange: Exchange) -> Action[None]:
    """Prefer the tokenizer's count of the golden prompt to the first usage."""
    target = exchange.target
    if not target.dialect.tokenize or target.kind != "chat":
        return
    fields = {"model": target.model, "messages": [{"role": "user", "content": GOLDEN_PROMPT}]}
    page = yield from exchange.fetch("POST", target.dialect.tokenize, json.dumps(fields).encode(), PATIENCE)
    value = json_of(page.body.decode("utf-8", "replace"))
    if page.status == 200 and isinstance(value, dict) and isinstance(value.get("count"), int):
        target.golden.prompt_tokens = value["count"]


def _leave_out_missing(exchange: Exchange) -> Action[None]:
    """Leave out the routes that this server was built or started without."""
    dialect = exchange.target.dialect
    missing = set()
    for path in {dialect.metrics, dialect.health, dialect.is_sleeping, dialect.is_paused, dialect.invariants} - {""}:
        page = yield from exchange.fetch("GET", path, None, PATIENCE)
        if page.status in (401, 403, 404, 405, 501):
            missing.add(path)
    names = ("metrics", "health", "is_sleeping", "is_paused", "invariants")
    changes: dict[str, Any] = {name: "" for name in names if getattr(dialect, name) in missing}
    exchange.target.dialect = replace(dialect, **changes)
