"""The interface between scheduling and the runner of a model: steps, drafts, sleep and new weights."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from trioengine.core.power import Tag
from trioengine.worker.scheduling.adapters import AdapterRunner
from trioengine.worker.scheduling.images import Vision
from trioengine.worker.scheduling.sequence import NO_WINDOWS, Sampled, SchedulerOutput, Sequence, Windows

OnProgress: TypeAlias = Callable[[int, int], None]  # (done, total), in bytes of weights


class WantedDraft(NamedTuple):
    """A draft of up to `most` tokens for a sequence of which only the last token is not computed."""

    sequence: Sequence
    most: int


class Drafter(Protocol):
    """Drafts the next tokens of sequences."""

    def draft(self, wanted: Items[WantedDraft], room: int) -> list[tuple[int, ...]]:
        """Return a draft for each, which may be empty; together they have no more than `room` tokens."""
        ...


class ModelRunner(Drafter, AdapterRunner, Protocol):
    """Runs the forward pass and the sampler, and drafts; the simulated worker has a toy one."""

    def execute(self, output: SchedulerOutput) -> list[Sampled]:
        """Copy blocks, encode tiles, then compute.

        Returns one entry for each scheduled sequence with `samples` or `scores`, in their order.
        """
        ...

    def prepare(self) -> bool:
        """Prepare one more thing for later steps, if any is missing; returns whether it did."""
        ...

    def sleep(self) -> None:
        """Give memory back to the system: the KV cache, and the weights, which are kept in host memory."""
        ...

    def wake(self, tags: frozenset[Tag]) -> None:
        """Take memory for these sleeping tags again. Raises ModelError if it cannot be had, and they still sleep."""
        ...

    def update_weights(self, path: str) -> str:
        """Load these weights; while the weights sleep, check them, drop the old ones, and load them at `wake`.

        Returns their quantization, as READY has it.

        Raises ModelError if they do not fit or cannot be read, and the old ones stay. After any other exception neither
        are there.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, and the size of its KV cache: READY's fields, and the limits of scheduling."""

    model_type: str
    device: str
    dtype: str
    kernels: str
    vocab_size: int
    max_model_len: int  # tokens; never more than the KV cache holds
    kv_blocks_total: int
    block_size: int
    quantization: str = "none"
    kv_cache_dtype: str = "float32"
    vision: Vision | None = None  # None: the model takes no images
    state_slots: int = 0  # 0: it has no states beside keys and values
    windows: Windows = NO_WINDOWS
    embeds: bool = False  # an embedding model
