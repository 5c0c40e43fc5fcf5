"""A sequence: the tokens of one request, how far they are computed, and the KV blocks that hold them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trioengine.core.sampling_params import SamplingParams
from trioengine.core.types import FinishReason, Usage
from trioengine.worker.scheduling.images import Picture, PromptImages
from trioengine.worker.scheduling.prefix_cache import root_digest


class SequenceStatus(enum.Enum):
    """Where a sequence stands with the scheduler."""

    WAITING_FOR_PAYLOAD = "waiting for payload"  # of an image; not in the line
    WAITING = "waiting"
    DECODING = "decoding"  # waits for its images to be decoded; not in the line
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request on the worker; owned and changed by the scheduler only."""

    session: int
    request: int
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    params: SamplingParams  # max_tokens and seed are set
    eos_token_ids: frozenset[int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  # tokens whose keys and values lie in the KV cache
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    block_table: list[int] = field(default_factory=list)  # token i lies in block_table[i // block_size]
    block_digests: list[bytes] = field(default_factory=list)  # of its first full blocks, see PrefixCache
    arrived_at: float = 0.0  # by the engine core's clock, as the next two
    started_at: float | None = None  # its first step began
    first_token_at: float | None = None
    images: PromptImages | None = None
    reading: tuple[Picture, ...] = ()  # whose decoded tiles are kept for it
    place: int = 0  # in the order of arrival
    root: bytes = field(init=False)  # of the chain of block digests, by the cache salt

    def __post_init__(self) -> None:
        self.root = root_digest(self.params.cache_salt)

    def content(self, start: int, end: int) -> list[int]:
        """The token ids that the prefix cache compares: for images, ids that stand for their content."""
        if self.images is None:
            return self.token_ids[start:end]
        return self.images.content(self.token_ids, start, end)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether only its latest output token is left to compute."""
        num_tokens = len(self.token_ids)
        return num_tokens > self.num_prompt_tokens and num_tokens - self.num_computed_tokens == 1

    def to_encode(self, start: int) -> tuple[Picture, ...]:
        """The pictures with tiles that have to be encoded before the tokens from `start` on are computed."""
        return () if self.images is None else self.images.not_encoded(start)

    def finish_reason(self, max_sequence_len: int) -> FinishReason | None:
        """Why it ends with its latest token, which is output; None if it goes on."""
        params, token_id = self.params, self.token_ids[-1]
        if self.num_output_tokens >= params.min_tokens and (
            token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos)
        ):
            return FinishReason.STOP
        if params.max_tokens is not None and self.num_output_tokens >= params.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if self.num_tokens >= max_sequence_len else None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def usage(self, now: float) -> Usage:
        """The usage so far."""
        started = now if self.started_at is None else self.started_at
        first_token = now if self.first_token_at is None else self.first_token_at
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            cached_tokens=self.num_cached_tokens,
            queue_time=started - self.arrived_at,
            prefill_time=first_token - started,
        )
