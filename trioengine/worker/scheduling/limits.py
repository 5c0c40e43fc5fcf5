"""What the scheduler may use: the worker's configuration joined with what the loaded model and its KV cache allow."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from trioengine.core.errors import RequestRejected

DEFAULT_ENCODER_CACHE_MEMORY = 256 << 20


@dataclass(frozen=True, slots=True)
class TileShape:
    """What each tile of an image takes; ValueError where that is nothing."""

    num_tokens: int  # of a prompt, consecutive: one for each row of the tile's features
    decoded_bytes: int  # of its pixels, as they are given to the encoder
    feature_bytes: int  # of all its features

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.decoded_bytes, self.feature_bytes) < 1:
            raise ValueError(f"a tile must have tokens, pixels and features, got {self}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Raises ValueError when nothing could ever be scheduled."""

    vocab_size: int
    max_model_len: int  # tokens of prompt and answer together
    kv_blocks_total: int
    block_size: int
    max_num_seqs: int = 128  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    chunked_prefill_size: int = 2048  # tokens of prompts in one step
    enable_prefix_caching: bool = True
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
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must hold a prompt and a token, got {self.max_model_len}")

    @property
    def max_sequence_len(self) -> int:
        """`max_model_len`, or less where the whole KV cache holds less: so any sequence can always run alone."""
        return min(self.max_model_len, self.kv_blocks_total * self.block_size)

    def check_prompt(self, token_ids: Items[int]) -> None:
        """Raise RequestRejected for a prompt that cannot run."""
        limit = self.max_sequence_len
        if not token_ids:
            raise RequestRejected("empty_prompt", "the prompt has no tokens")
        if len(token_ids) >= limit:
            raise RequestRejected(
                "context_length_exceeded",
                f"the prompt has {len(token_ids)} tokens, and prompt and answer together at most {limit}",
            )
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise RequestRejected("invalid_value", f"token ids must be from 0 to {self.vocab_size - 1}")
