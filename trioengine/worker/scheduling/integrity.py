"""Whether the sequences of the scheduler stand where their states say."""

from __future__ import annotations

from collections.abc import Sequence as Items

from trioengine.core.errors import InvariantError
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus

_IN_LINE = frozenset({SequenceStatus.WAITING, SequenceStatus.PREEMPTED})
_OUT_OF_LINE = frozenset({SequenceStatus.WAITING_FOR_PAYLOAD, SequenceStatus.DECODING})


def check_order(running: Items[Sequence], waiting: Items[Sequence], out: Items[Sequence]) -> None:
    """Raise InvariantError unless those that wait hold nothing, and are in the order of arrival where they are in line.

    `out`: out of the line.
    """
    for sequence in running:
        if sequence.status is not SequenceStatus.RUNNING:
            raise InvariantError(f"request {sequence.request} runs and is {sequence.status.value}")
    places = [sequence.place for sequence in waiting]
    if places != sorted(places):
        raise InvariantError(f"sequences wait in the order {places} of their arrival")
    for sequences, statuses in ((waiting, _IN_LINE), (out, _OUT_OF_LINE)):
        for sequence in sequences:
            if sequence.status not in statuses or sequence.block_table or sequence.num_computed_tokens:
                raise InvariantError(
                    f"request {sequence.request} waits, is {sequence.status.value}, holds {len(sequence.block_table)} "
                    f"blocks and has {sequence.num_computed_tokens} tokens computed"
                )
