"""The dialects: the routes, gauges and freedoms of each kind of server, as data.

A set named `…_may` lists the outcomes that the server may choose from where servers differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Power(Enum):
    """The state of the server as the operator's calls imply it."""

    AWAKE = "awake"
    PAUSED = "paused"
    ASLEEP = "asleep"


TRANSITIONS = {
    (Power.AWAKE, "pause"): Power.PAUSED,
    (Power.PAUSED, "resume"): Power.AWAKE,
    (Power.AWAKE, "resume"): Power.AWAKE,
    (Power.AWAKE, "sleep"): Power.ASLEEP,
    (Power.ASLEEP, "wake"): Power.AWAKE,
    (Power.AWAKE, "wake"): Power.AWAKE,
    (Power.AWAKE, "update"): Power.AWAKE,
    (Power.AWAKE, "reset"): Power.AWAKE,
}
RESTORE = {Power.PAUSED: "resume", Power.ASLEEP: "wake"}  # the call that makes the server answer again


@dataclass(frozen=True)
class Call:
    """An operator's request; `{id}` and `{model}` in its body are replaced."""

    method: str
    path: str
    body: str | None = None


@dataclass(frozen=True)
class Gauge:
    """A number that returns to its value at rest; by at most `tolerance` it may stay above it."""

    name: str
    tolerance: float = 0.0


@dataclass(frozen=True)
class JsonCount:
    """A gauge that is the sum of all values of `key` in the JSON of a route."""

    path: str
    key: str


@dataclass(frozen=True)
class Dialect:
    """The routes of a kind of server; an empty path or tuple is a feature that it lacks."""

    name: str
    chat: str = "/v1/chat/completions"
    completions: str = "/v1/completions"
    native: str = ""  # a completion route of its own, for requests that are abandoned
    models: str = "/v1/models"
    health: str = ""
    metrics: str = ""
    gauges: tuple[Gauge, ...] = ()
    counts: tuple[JsonCount, ...] = ()
    counters: tuple[str, ...] = ()
    finished: str = ""  # the counter of finished requests
    still: str = ""  # the counter of generated tokens, which stands still at rest
    tokenize: str = ""  # takes {"model", "messages"} and answers {"count"}
    id_field: str = ""  # the field of a request that names its id
    invariants: str = ""  # a route that answers 200 if the server's books balance
    calls: dict[str, tuple[Call, ...]] = field(default_factory=dict)  # by rule, one for each variant
    is_sleeping: str = ""
    is_paused: str = ""
    state_may: tuple[tuple[Power, str], ...] = ()  # routes that may report true in a state other than their own
    clears_cache: tuple[str, ...] = ("update", "reset")
    awake_may: tuple[int, ...] = (200, 429, 503)  # statuses of a valid request
    unavailable_may: tuple[int, ...] = (200, 400, 403, 409, 429, 500, 503)  # … when paused or asleep, or ended by it
    bad_may: tuple[int, ...] = (400, 401, 403, 404, 405, 408, 411, 413, 414, 415, 422, 429, 431, 501, 503)
    memory_may: int = 512 << 20  # bytes that the process may grow by
    extra: dict[str, object] = field(default_factory=dict)  # fields of every request


OPENAI = Dialect("openai", health="/health", bad_may=(*Dialect("").bad_may, 200, 500))
VLLM = Dialect(
    "vllm",
    health="/health",
    metrics="/metrics",
    gauges=(
        Gauge("vllm:num_requests_running"),
        Gauge("vllm:num_requests_waiting"),
        Gauge("vllm:kv_cache_usage_perc", 0.01),
    ),
    counters=("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:request_success_total"),
    finished="vllm:request_success_total",
    still="vllm:generation_tokens_total",
    tokenize="/tokenize",
    calls={
        "pause": (Call("POST", "/pause"), Call("POST", "/pause?mode=abort"), Call("POST", "/pause?mode=keep")),
        "resume": (Call("POST", "/resume"),),
        "sleep": (Call("POST", "/sleep?level=1"),),
        "wake": (Call("POST", "/wake_up"),),
        "reset": (Call("POST", "/reset_prefix_cache"),),
    },
    is_sleeping="/is_sleeping",
    is_paused="/is_paused",
    state_may=((Power.PAUSED, "/is_sleeping"), (Power.ASLEEP, "/is_paused")),  # a pause is a sleep of level 0
    bad_may=(*Dialect("").bad_may, 500),
)
SGLANG = Dialect(
    "sglang",
    health="/health",
    metrics="/metrics",
    gauges=(
        Gauge("sglang:num_running_reqs"),
        Gauge("sglang:num_queue_reqs"),
        Gauge("sglang:token_usage", 0.02),
    ),
    counts=(JsonCount("/v1/loads", "num_running_reqs"), JsonCount("/v1/loads", "num_waiting_reqs")),
    counters=("sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:num_requests_total"),
    still="sglang:generation_tokens_total",
    id_field="rid",
    calls={
        "abort": (Call("POST", "/abort_request", '{"rid": "{id}"}'),),
        "abort_all": (Call("POST", "/abort_request", '{"rid": "", "abort_all": true}'),),
        "pause": (Call("POST", "/pause_generation", "{}"),),
        "resume": (Call("POST", "/continue_generation", "{}"),),
        "update": (Call("POST", "/update_weights_from_disk", '{"model_path": "{model}"}'),),
        "reset": (Call("POST", "/flush_cache"),),
    },
    bad_may=(*Dialect("").bad_may, 500),
)
LLAMA_CPP = Dialect(
    "llama.cpp",
    native="/completion",
    health="/health",
    metrics="/metrics",
    gauges=(Gauge("llamacpp:requests_processing"), Gauge("llamacpp:requests_deferred")),
    counts=(JsonCount("/slots", "is_processing"),),
    counters=("llamacpp:tokens_predicted_total", "llamacpp:prompt_tokens_total"),
    still="llamacpp:tokens_predicted_total",
    memory_may=11 << 30,  # 8 GiB are its prompt cache (--cache-ram), the rest is kept by the HTTP threads
    bad_may=(*Dialect("").bad_may, 200, 500),
)
TRIOENGINE = Dialect(
    "trioengine",
    completions="",
    health="/health",
    metrics="/metrics",
    gauges=(
        Gauge("trioengine_num_requests_running"),
        Gauge("trioengine_num_requests_waiting"),
        Gauge("trioengine_num_requests_suspended"),
        Gauge("trioengine_num_sessions"),
        Gauge("trioengine_kv_cache_usage_perc", 0.001),
        Gauge("trioengine_buffered_bytes", 4096.0),
    ),
    counters=(
        "trioengine_generation_tokens_total",
        "trioengine_prompt_tokens_total",
        "trioengine_request_success_total",
        "trioengine_requests_aborted_total",
        "trioengine_client_disconnected_total",
        "trioengine_worker_restarts_total",
    ),
    finished="trioengine_request_success_total",
    still="trioengine_generation_tokens_total",
    tokenize="/tokenize",
    id_field="request_id",
    invariants="/debug/invariants",
    calls={
        "abort": (Call("POST", "/abort_request", '{"request_id": "{id}"}'),),
        "abort_all": (Call("POST", "/abort_request", '{"abort_all": true}'),),
        "sleep": (
            Call("POST", "/sleep?level=1"),
            Call("POST", "/sleep?level=1&mode=keep"),
            Call("POST", "/sleep?level=1&mode=wait&timeout=1"),
            Call("POST", "/sleep?level=2"),
        ),
        "wake": (Call("POST", "/wake_up"),),
        "update": (Call("POST", "/update_weights", '{"name": "{model}"}'),),
    },
    is_sleeping="/is_sleeping",
)
DIALECTS = {each.name: each for each in (OPENAI, VLLM, SGLANG, LLAMA_CPP, TRIOENGINE)}
SIGNS = {  # the dialect by the names of its metrics, or the route that only it has
    "trioengine_": "trioengine",
    "vllm:": "vllm",
    "sglang:": "sglang",
    "llamacpp:": "llama.cpp",
}
