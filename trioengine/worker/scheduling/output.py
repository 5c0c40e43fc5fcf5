"""What the scheduler asks of a step, and what the model runner answers: all that the two know of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trioengine.core.messages import SAMPLING_FAILED
from trioengine.core.power import Tag
from trioengine.core.types import Logprobs
from trioengine.worker.scheduling.pictures import Tile
from trioengine.worker.scheduling.prompt_images import TilePiece
from trioengine.worker.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `num_new_tokens` tokens of the sequence, from `num_computed_tokens` on; read only for the runner."""

    sequence: Sequence
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the sequence's last, so that a new one is to be sampled."""
        return self.sequence.num_computed_tokens + self.num_new_tokens == self.sequence.num_tokens

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

    What lies behind them in the source is another's, and may be not finite.
    """

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: never empty; every block that the tokens need is in the sequences' block tables.

    First the `copies` are made, all from what lies in the blocks before the step, and the tiles of `encode` get their
    features, `picture.features[number]`, from `picture.tiles`. Then all tiles of the scheduled tokens have features.
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[BlockCopy, ...] = ()
    encode: tuple[Tile, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.scheduled)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence, or why there is none."""

    request: int
    token_id: int
    logprobs: Logprobs | None = None  # {token_id: logprob}, the chosen token first; when asked for
    error: str | None = None  # the request fails alone (logits that are not finite, say); token_id means nothing
    code: str = SAMPLING_FAILED  # of the error; NO_TOKEN_LEFT: the request's parameters are the reason


class ModelRunner(Protocol):
    """Runs the forward pass and the sampler; the simulated worker has a toy one."""

    def execute(self, output: SchedulerOutput) -> list[SampledToken]:
        """Copy blocks, encode tiles, then compute: one entry for each scheduled sequence with `samples`, in order."""
        ...

    def sleep(self) -> None:
        """Give memory back to the system: the KV cache, and the weights, which are kept in host memory."""
        ...

    def wake(self, tags: frozenset[Tag]) -> None:
        """Take memory for these tags again, which sleep. ModelError: it could not be had, and they still sleep."""
        ...

    def update_weights(self, path: str) -> None:
        """Load these weights; where the weights sleep, check them, drop the old ones, and load them at `wake`.

        ModelError: they do not fit the model or cannot be read, and the old ones are still there. Any other exception:
        these neither.
        """
        ...
