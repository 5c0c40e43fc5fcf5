"""A sequence, and one step over sequences: its limits, and its plan.

A step is planned (`StepPlan`) and given to the runner (`SchedulerOutput`), which returns a `Sampled` for each sequence
whose last token it has computed, or whose prompt gets logprobs.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias

from trioengine.core.errors import InvariantError, RequestRejected
from trioengine.core.messages import NO_ADAPTER, RequestFailed, TokensRow
from trioengine.core.sampling_params import ResolvedParams, check_room
from trioengine.core.types import FinishReason, Logprobs, Usage, token_ids
from trioengine.worker.scheduling.images import Picture, PromptImages, Tile, TilePiece, TileShape
from trioengine.worker.scheduling.speculation import Pace
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy, StateSave

BlockTable: TypeAlias = "array[int] | list[int]"

DEFAULT_ENCODER_CACHE_MEMORY = 256 << 20
MAX_FORCED = 15  # tokens in a row that are not sampled, because a grammar allows no others


class Constraint(Protocol):
    """How far an answer has followed its grammar."""

    def advance(self, output: Items[int]) -> None:
        """Take in the tokens of the answer beyond those that it has taken in already."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether no token can follow but an end token."""
        ...

    def allowed(self) -> bytes:
        """The tokens that may come next: a bit for each, the first token's lowest. Raises GrammarFailed."""
        ...

    def forced(self) -> int | None:
        """The next token if only one may come; None too if the grammar fails."""
        ...


class SequenceStatus(enum.Enum):
    """Where a sequence stands with the scheduler."""

    PARKED = "parked"  # until the payloads of its images and its grammar are there; not in the line
    WAITING = "waiting"
    DECODING = "decoding"  # waits for its images to be decoded; not in the line
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


def _no_blocks() -> BlockTable:
    """An empty array of int64: a step copies a whole table at once; a list would be copied object by object."""
    return array("q")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One request on the worker; owned and changed by the scheduler only."""

    session: int
    request: int
    token_ids: list[int]  # prompt, then output
    num_prompt_tokens: int
    params: ResolvedParams
    eos_token_ids: frozenset[int]
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  # tokens whose keys and values lie in the KV cache
    num_scored: int = 1  # tokens of the prompt whose logprobs were sent, if asked for; the first one has none
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    block_table: BlockTable = field(default_factory=_no_blocks)  # token i lies in block_table[i // block_size]
    window_table: BlockTable = field(default_factory=_no_blocks)  # in layers with windows, from block num_behind on
    num_behind: int = 0  # blocks that none of the next tokens sees in these layers
    block_digests: list[bytes] = field(default_factory=list)  # of none, one, two… of its first blocks
    arrived_at: float = 0.0  # by the engine core's clock, as the next two
    started_at: float | None = None  # its first step began
    first_token_at: float | None = None
    images: PromptImages | None = None
    reading: tuple[Picture, ...] = ()  # whose decoded tiles are kept for it
    place: int = 0  # in the order of arrival
    constraint: Constraint | None = None  # once its grammar is compiled
    num_forced: int = 0  # of its latest tokens: appended behind the latest sampled one, because no others could come
    pace: Pace | None = None  # of its drafts; None: no speculation
    state_slot: int = PADDING_SLOT  # while it runs, in a model with states
    adapter: int = NO_ADAPTER  # the number of its adapter
    save_points: tuple[int, ...] = ()  # numbers of tokens behind which a step saves the state

    @property
    def is_compiling(self) -> bool:
        """Whether its grammar has yet to be compiled."""
        return self.params.grammar is not None and self.constraint is None

    @property
    def output(self) -> list[int]:
        """The token ids of the answer so far."""
        return self.token_ids[self.num_prompt_tokens :]

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
        """Whether only its latest output token is left to compute, and forced ones behind it."""
        num_tokens = len(self.token_ids)
        return num_tokens > self.num_prompt_tokens and num_tokens - self.num_computed_tokens <= 1 + self.num_forced

    @property
    def max_prefix(self) -> int:
        """How many of its first tokens may come from the prefix cache; the others have logprobs to be computed."""
        if self.params.prompt_logprobs is None or self.num_scored >= self.num_prompt_tokens:
            return len(self.token_ids) - 1
        return self.num_scored - 1

    def scores(self, start: int, end: int) -> range:
        """Which tokens of the prompt get their logprobs when the tokens from `start` to `end` are computed."""
        if self.params.prompt_logprobs is None:
            return range(0)
        return range(max(start + 1, self.num_scored), min(end + 1, self.num_prompt_tokens))

    def count_scores(self, row: TokensRow | None, num_scores: int) -> None:
        """Count the logprobs of its prompt in a row. Raises InvariantError unless there are so many."""
        num_found = 0 if row is None or row.prompt_logprobs is None else len(row.prompt_logprobs)
        if num_found != num_scores:
            raise InvariantError(f"request {self.request} got {num_found} of {num_scores} logprobs of its prompt")
        self.num_scored += num_scores

    def to_encode(self, start: int) -> tuple[Picture, ...]:
        """The pictures with tiles that have to be encoded before the tokens from `start` on are computed."""
        return () if self.images is None else self.images.not_encoded(start)

    def finish_reason(self, max_sequence_len: int) -> FinishReason | None:
        """Why it ends with its latest token, which is output unless max_tokens is 0; None if it goes on."""
        params, token_id = self.params, self.token_ids[-1]
        if params.max_tokens == 0:
            return FinishReason.LENGTH
        if self.num_output_tokens >= params.min_tokens and (
            token_id in params.stop_token_ids or (token_id in self.eos_token_ids and not params.ignore_eos)
        ):
            return FinishReason.STOP
        if self.constraint is not None:
            self.constraint.advance(self.output)
            if self.constraint.is_complete:
                return FinishReason.STOP
        if params.max_tokens is not None and self.num_output_tokens >= params.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if self.num_tokens >= max_sequence_len else None

    def append_sampled(self, row: TokensRow, max_sequence_len: int) -> FinishReason | None:
        """Append the row's tokens, and cut the row behind the one with which the answer ends.

        Returns why it ends; None if it goes on.
        """
        if self.params.max_tokens == 0:
            row.token_ids, row.logprobs = token_ids(), None
            return FinishReason.LENGTH
        for count, token_id in enumerate(row.token_ids, start=1):
            self.token_ids.append(token_id)
            finish_reason = self.finish_reason(max_sequence_len)
            if finish_reason is not None:
                del row.token_ids[count:]
                row.logprobs = row.logprobs and row.logprobs[:count]
                return finish_reason
        return None

    def num_tokens_left(self, max_sequence_len: int) -> int:
        """How many tokens can follow, at most."""
        left = max_sequence_len - self.num_tokens
        return left if self.params.max_tokens is None else min(left, self.params.max_tokens - self.num_output_tokens)

    def forced_token(self) -> int | None:
        """The next token if it can be appended without sampling: the only one that its grammar and parameters allow.

        Logprobs need the logits of every token. A stop token before `min_tokens` is left to the sampler, which bans it.
        """
        params = self.params
        if self.constraint is None or params.logprobs is not None:
            return None
        token_id = self.constraint.forced()
        is_stop = token_id in self.eos_token_ids or token_id in params.stop_token_ids
        return None if is_stop and self.num_output_tokens < params.min_tokens else token_id

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def row(self, token_id: int, logprobs: Logprobs | None = None) -> TokensRow:
        """The row of a step with its next token; `logprobs` have the chosen token first."""
        return TokensRow(self.session, self.request, token_ids((token_id,)), None if logprobs is None else (logprobs,))

    def scored_row(self, row: TokensRow | None, prompt_logprobs: tuple[Logprobs, ...]) -> TokensRow:
        """The row of a step, with its next token or without, with logprobs of its prompt."""
        if row is None:
            row = TokensRow(self.session, self.request, token_ids())
        row.prompt_logprobs = prompt_logprobs
        return row

    def embedded_row(self, embedding: bytes) -> TokensRow:
        """The only row of a sequence that is embedded."""
        return TokensRow(self.session, self.request, token_ids(), embedding=embedding)

    def failure(self, code: str, message: str) -> RequestFailed:
        """The error that ends this request alone."""
        return RequestFailed(self.session, self.request, code, message)

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


class Windows(NamedTuple):
    """Blocks of the KV cache for layers with windows, which the other layers do not share."""

    size: int = 0  # tokens that a query sees, itself among them; of several, the largest
    num_blocks: int = 0

    def __bool__(self) -> bool:
        return self.size > 0


NO_WINDOWS = Windows()  # the model has none, or keeps all blocks of these layers


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits by the configuration, the model and the KV cache. Raises ValueError if nothing could be scheduled."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together
    kv_blocks_total: int
    block_size: int
    max_num_seqs: int = 128  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    chunked_prefill_size: int = 2048  # tokens of prompts in one step
    enable_prefix_caching: bool = True
    state_slots: int = 0  # of the model's states, one of them for padding; 0: it has none
    windows: Windows = NO_WINDOWS
    embeds: bool = False  # an embedding model: prompts are embedded, and nothing is sampled
    tile: TileShape | None = None  # None: the model takes no images
    max_tiles_per_step: int = 1  # that are encoded
    encoder_cache_memory: int = DEFAULT_ENCODER_CACHE_MEMORY  # bytes of features that no sequence uses

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "kv_blocks_total",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "chunked_prefill_size",
            "max_tiles_per_step",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.state_slots == 1 or self.state_slots < 0:
            raise ValueError(f"state_slots must be 0 or at least 2, got {self.state_slots}")
        longest = self.windows.size + self.max_num_batched_tokens + MAX_FORCED  # of which blocks are held together
        least = min(self.kv_blocks_total, 2 + -(-longest // self.block_size))
        if self.windows and self.windows.num_blocks < least:
            raise ValueError(f"windows must have at least {least} blocks, got {self.windows.num_blocks}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must hold a prompt and a token, got {self.max_model_len}")

    @property
    def max_sequence_len(self) -> int:
        """`max_model_len`, or less where the whole KV cache holds less: so any sequence can always run alone."""
        return min(self.max_model_len, self.kv_blocks_total * self.block_size)

    def check_prompt(self, token_ids: Items[int], max_tokens: int | None) -> None:
        """Raise RequestRejected for a prompt that cannot run, for an answer of so many tokens."""
        if not token_ids:
            raise RequestRejected("empty_prompt", "the prompt has no tokens")
        check_room(len(token_ids), self.max_sequence_len, max_tokens)
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise RequestRejected("invalid_value", f"token ids must be from 0 to {self.vocab_size - 1}")


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `num_new_tokens` tokens of the sequence, from `num_computed_tokens` on; read only for the runner.

    The tokens of a draft come last, behind the tokens that the sequence has.
    """

    sequence: Sequence
    num_new_tokens: int
    draft: tuple[int, ...] = ()
    saves: tuple[StateSave, ...] = ()  # of states behind some of these tokens

    @property
    def samples(self) -> bool:
        """Whether the sequence's last token is among these, so that a new one is to be sampled."""
        return self.sequence.num_computed_tokens + self.num_new_tokens >= self.sequence.num_tokens

    @property
    def sampled_behind(self) -> list[Sequence]:
        """The sequence, and copies with the first token of the draft, with two of them, and so on.

        A token is sampled behind each. They are read only.
        """
        sequence = self.sequence
        if not self.samples:
            return []
        drafted = (self.draft[:end] for end in range(1, len(self.draft) + 1))
        return [sequence, *(replace(sequence, token_ids=[*sequence.token_ids, *some]) for some in drafted)]

    @property
    def new_token_ids(self) -> list[int]:
        """The ids of these tokens."""
        start = self.sequence.num_computed_tokens
        end = start + self.num_new_tokens - len(self.draft)
        return [*self.sequence.token_ids[start:end], *self.draft]

    @property
    def scores(self) -> range:
        """Which tokens of the prompt get their logprobs; each is computed from the row of the token before it."""
        start = self.sequence.num_computed_tokens
        return self.sequence.scores(start, start + self.num_new_tokens)

    @property
    def tile_pieces(self) -> list[TilePiece]:
        """Which of these tokens are embedded by which features, in the order of the tokens."""
        sequence = self.sequence
        if sequence.images is None:
            return []
        start = sequence.num_computed_tokens
        return sequence.images.pieces(start, start + self.num_new_tokens)


class BlockCopy(NamedTuple):
    """Keys and values of a block's first tokens, as they are before the step, go to another, which is 0 behind them.

    The rest of the source belongs to another sequence, and may be not finite.
    """

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: never empty; every block that the tokens need is in the sequences' block tables.

    First the `copies` are made, all from the blocks' content before the step, and the tiles of `encode` get their
    features, `picture.features[number]`, from `picture.tiles`. Then all tiles of the scheduled tokens have features.
    `window_copies`, of blocks of windows, and `state_copies` are made as `copies` are; then the slot of each sequence
    has the state behind its computed tokens.
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    encode: tuple[Tile, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    window_copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.scheduled)


# A row with a token, with logprobs of the prompt, or both, or with an embedding, still without finish reason and usage;
# or an error.
Sampled: TypeAlias = TokensRow | RequestFailed
