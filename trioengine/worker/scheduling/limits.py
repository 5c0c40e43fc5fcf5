"""What the scheduler may use: the worker's configuration joined with what the loaded model and its KV cache allow."""

from __future__ import annotations

from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "kv_blocks_total",
            "block_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "chunked_prefill_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must hold a prompt and a token, got {self.max_model_len}")

    @property
    def max_sequence_len(self) -> int:
        """`max_model_len`, or less where the whole KV cache holds less: so any sequence can always run alone."""
        return min(self.max_model_len, self.kv_blocks_total * self.block_size)
