"""The state slots of the toy model: the state behind a token is the token's value, which depends on all before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trioengine.worker.scheduling.sequence import ScheduledSequence
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy

_BEFORE_ALL = 0  # the state of a sequence without tokens
_PADDING = -1  # rows of padding leave this behind


class ToyStates:
    """Raises AssertionError where a sequence goes on with the state of another one, or of other tokens of its own."""

    def __init__(self) -> None:
        self._states: dict[int, int] = {}

    def reset(self) -> None:
        """Lose all states."""
        self._states.clear()

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Read all sources, then write the targets; and pad the step with a row, as a captured graph does."""
        states = [_BEFORE_ALL if source == PADDING_SLOT else self._states.get(source) for source, _ in copies]
        for (source, target), state in zip(copies, states, strict=True):
            assert state is not None, f"state slot {target} gets the state of slot {source}, which has none"
            self._states[target] = state
        self._states[PADDING_SLOT] = _PADDING

    def advance(self, entry: ScheduledSequence, value: Callable[[int], int]) -> None:
        """Check the state before an entry's tokens, and store those behind them; `value`: of a token, by position."""
        sequence = entry.sequence
        computed, name = sequence.num_computed_tokens, f"request {sequence.request}"
        expected = value(computed - 1) if computed else _BEFORE_ALL
        found = self._states.get(sequence.state_slot)
        assert sequence.state_slot != PADDING_SLOT, f"{name} has the state slot of the padding"
        assert found == expected, f"{name} goes on behind {computed} tokens with a state of something else"
        for slot, num_tokens in entry.saves:
            self._states[slot] = value(num_tokens - 1)
        self._states[sequence.state_slot] = value(computed + entry.num_new_tokens - 1)
