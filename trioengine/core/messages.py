"""The messages between the engine and its worker.

Each class is one message; its name on the wire is `WIRE_NAMES[cls]`. Session and request ids are minted by the engine
and never used again. Token ids are `TokenIds`, packed as little-endian int32 on the wire.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import TypeAlias, get_args

from trioengine.core.config import WorkerConfig
from trioengine.core.image import ImageInfo
from trioengine.core.power import Tag
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import FinishReason, Logprobs, TokenIds, Usage

SAMPLING_FAILED = "sampling_failed"  # codes of REQUEST_FAILED, in addition to RequestRejected's
NO_TOKEN_LEFT = "no_token_left"
INVALID_GRAMMAR = "invalid_grammar"  # it cannot be compiled, or not followed
ADAPTER_FAILED = "adapter_failed"  # it cannot be loaded
NO_ADAPTER = 0  # the id of the model as it is


# ---- to the worker -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Configure:
    """The first message of an incarnation: load this model."""

    config: WorkerConfig


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter, which the worker loads with the first request that uses it."""

    id: int  # minted by the engine, and never NO_ADAPTER
    path: str


@dataclass(frozen=True, slots=True)
class AddSession:
    """Begin an attachment, whose requests use the adapter."""

    session: int
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image of a prompt. Its bytes travel beside the frames, as a payload."""

    payload: int  # id of the payload; minted for this message, and never used again
    name: str  # of the image's part in the request, for error messages: messages[0].content[1]
    digest: bytes  # of its bytes and the request's cache salt; equal digests mean equal images
    info: ImageInfo
    num_bytes: int
    tiles: TokenIds  # position of each tile's first token among the session's tokens, ascending


@dataclass(frozen=True, slots=True)
class AddMessage:
    """Run a request: truncate the session's tokens to `base`, append `token_ids`, and generate.

    The last `num_output` of these are output of another attachment, which the request continues. It starts once the
    payloads of its images have arrived.
    """

    session: int
    request: int
    base: int  # tokens of the session that are kept; beyond its length: RemoteProtocolError
    token_ids: TokenIds
    params: ResolvedParams
    eos_token_ids: tuple[int, ...]
    num_output: int = 0
    images: tuple[ImageInput, ...] = ()  # of the whole prompt, those before `base` included


@dataclass(frozen=True, slots=True)
class StopSession:
    """Abort this request; legal, and ignored, when it has finished."""

    session: int
    request: int


@dataclass(frozen=True, slots=True)
class EndSession:
    """End the attachment: drop its request and tokens, and reply SESSION_ENDED."""

    session: int


@dataclass(frozen=True, slots=True)
class Audit:
    """Request a report of the worker's state (AUDITED)."""

    audit: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Request a PONG. The worker's reader thread answers it, also in the middle of a step."""

    ping: int


@dataclass(frozen=True, slots=True)
class Sleep:
    """Drop all computed state, and release memory: the KV cache, and the weights, which are kept in host memory.

    No session may exist.
    """


@dataclass(frozen=True, slots=True)
class Wake:
    """Allocate memory for these tags again; weights that were discarded are loaded."""

    tags: tuple[Tag, ...]


@dataclass(frozen=True, slots=True)
class UpdateWeights:
    """Load other weights of the same architecture; if the weights sleep, only check them, and load them at WAKE.

    State that was computed with the old weights is dropped. No session may exist.
    """

    path: str
    weight_version: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Exit."""


# ---- from the worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loading:
    """Progress of loading the model, in bytes of weights."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker accepts sessions from now on; its limits."""

    model_type: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together; never more than the KV cache holds
    kv_blocks_total: int
    block_size: int
    kernels: str  # native or torch
    weight_version: int = 1  # of the weights that the worker began with
    quantization: str = "none"  # of the weights in use: gguf, int8: products of integers
    kv_cache_dtype: str = "float32"
    state_slots: int = 0  # of states beside keys and values, one of them for padding; 0: the model has none
    window_blocks_total: int = 0  # of the KV cache, for layers with windows; 0: these share the blocks of the others


@dataclass(slots=True)  # one for each token: a frozen one takes four times as long to make
class TokensRow:
    """One sequence's part of a step; its last row has `finish_reason`, `usage` it and the row of the first token.

    Without logprobs, tokens that the grammar forces follow the sampled one.
    """

    session: int
    request: int
    token_ids: TokenIds  # empty for an abort, before the first token, and where max_tokens is 0
    logprobs: tuple[Logprobs, ...] | None = None  # one a token, when asked for
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[Logprobs, ...] | None = None  # when asked for, of the next tokens of the prompt, from 1 on
    embedding: bytes | None = None  # in the last row of an embedding model's: little-endian float32, normalized


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """The worker's counters."""

    num_sessions: int
    num_waiting: int
    num_running: int
    num_steps: int
    num_tokens: int  # computed in these steps, of prompts and answers
    num_preemptions: int
    kv_blocks_total: int
    kv_blocks_free: int  # holding nothing
    kv_blocks_cached: int  # used by no sequence, kept for the prefix cache
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    encoder_cache_queries: int = 0  # images looked up
    encoder_cache_hits: int = 0  # images whose features were found
    prompt_tokens: int = 0  # of requests whose first token this worker computed
    generation_tokens: int = 0
    draft_tokens: int = 0  # drafted and verified
    accepted_tokens: int = 0  # of these: drafts that became part of answers
    state_slots_free: int = 0  # without a state
    state_slots_kept: int = 0  # used by no sequence, kept for the prefix cache
    window_blocks_free: int = 0  # as kv_blocks_free, for layers with windows
    window_blocks_cached: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """One step: a row for each sequence that got a token, logprobs of its prompt or its end; there may be none.

    A step with many embeddings takes several messages.
    """

    rows: tuple[TokensRow, ...]
    statistics: WorkerStatistics


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request's outcome is an error; other requests are not affected."""

    session: int
    request: int
    code: str  # SAMPLING_FAILED is the worker's fault; any other code is the request's
    message: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The attachment has ended: its blocks are free, and none of its rows follows."""

    session: int
    statistics: WorkerStatistics


@dataclass(frozen=True, slots=True)
class PayloadConsumed:
    """The worker has closed this payload, used or not. Sent once for each payload."""

    payload: int


@dataclass(frozen=True, slots=True)
class Audited:
    """The worker's state: blocks free + cached + held = total, and state slots free + kept + held = total - 1.

    Blocks of windows are for layers that have windows, where these do not share the others' blocks.
    """

    audit: int
    sessions: tuple[int, ...]
    requests: tuple[int, ...]
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int
    kv_blocks_held: int
    payloads: tuple[int, ...] = ()  # announced, and not consumed
    state_slots_total: int = 0  # 0: the model has no states
    state_slots_free: int = 0
    state_slots_kept: int = 0
    state_slots_held: int = 0
    window_blocks_total: int = 0
    window_blocks_free: int = 0
    window_blocks_cached: int = 0
    window_blocks_held: int = 0


@dataclass(frozen=True, slots=True)
class Slept:
    """The memory is released. A worker that cannot do so sends FATAL."""


@dataclass(frozen=True, slots=True)
class Woken:
    """The tags are awake; with an error, nothing has changed."""

    error: str | None


@dataclass(frozen=True, slots=True)
class Updated:
    """The new weights are in use; with an error, still the old ones."""

    error: str | None
    quantization: str = "none"  # of the new ones, as in READY


class Activity(enum.Enum):
    """The activity of the worker's main thread."""

    STARTING = "starting"
    LOADING = "loading"  # the model at the start; also sleep, wake and update
    IDLE = "idle"
    STEPPING = "stepping"


@dataclass(frozen=True, slots=True)
class Pong:
    """The reply to PING."""

    ping: int
    progress: int  # grows with every step and every message handled
    activity: Activity
    seconds: float  # in this activity


class FatalCode(enum.Enum):
    """The reason why a worker cannot continue."""

    MODEL = "model"  # the model cannot be found, read or run: a ModelError, and no restart helps
    MEMORY = "memory"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Fatal:
    """The worker cannot continue, and exits."""

    code: FatalCode
    message: str
    traceback: str


ToWorker: TypeAlias = (
    Configure
    | AddSession
    | AddMessage
    | StopSession
    | EndSession
    | Audit
    | Ping
    | Sleep
    | Wake
    | UpdateWeights
    | Shutdown
)
FromWorker: TypeAlias = (
    Loading
    | Ready
    | Tokens
    | RequestFailed
    | SessionEnded
    | PayloadConsumed
    | Audited
    | Pong
    | Slept
    | Woken
    | Updated
    | Fatal
)
Message: TypeAlias = ToWorker | FromWorker

ControlRequest: TypeAlias = Sleep | Wake | UpdateWeights
ControlReply: TypeAlias = Slept | Woken | Updated

WIRE_NAMES: dict[type, str] = {  # AddSession: ADD_SESSION
    cls: re.sub(r"(?<=.)(?=[A-Z])", "_", cls.__name__).upper() for cls in get_args(Message)
}
