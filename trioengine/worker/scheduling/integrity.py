"""Checks of the lists of sequences that run and wait, and of the rows of a step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from trioengine.core.errors import InvariantError
from trioengine.core.messages import TokensRow
from trioengine.worker.scheduling.sequence import Sequence, SequenceStatus

_IN_LINE = frozenset({SequenceStatus.WAITING, SequenceStatus.PREEMPTED})
_OUT_OF_LINE = frozenset({SequenceStatus.PARKED, SequenceStatus.DECODING})


def check_known(listed: Items[Sequence], known: Mapping[int, Sequence]) -> None:
    """Raise InvariantError unless the listed sequences, running or waiting, are exactly the known ones."""
    if len(listed) != len(known) or any(known.get(sequence.request) is not sequence for sequence in listed):
        raise InvariantError(f"{len(listed)} sequences run or wait, {len(known)} are known")


def check_prefills(running: Items[Sequence]) -> None:
    """Raise InvariantError if any but the latest is in the middle of its prefill."""
    if not all(sequence.is_decoding for sequence in running[:-1]):
        raise InvariantError("a sequence is in the middle of its prefill, and a later one runs")


def check_order(running: Items[Sequence], waiting: Items[Sequence], out: Items[Sequence]) -> None:
    """Raise InvariantError unless waiting sequences hold nothing, and are in order of arrival while in line.

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
            holds = sequence.block_table or sequence.num_computed_tokens or sequence.state_slot
            if sequence.status not in statuses or holds:
                raise InvariantError(
                    f"request {sequence.request} waits, is {sequence.status.value}, holds {len(sequence.block_table)} "
                    f"blocks and state slot {sequence.state_slot}, with {sequence.num_computed_tokens} tokens computed"
                )


def check_kept(row: TokensRow, draft: tuple[int, ...]) -> None:
    """Raise InvariantError if tokens before the last one of a row are not those that were drafted."""
    kept = tuple(row.token_ids[:-1])
    if kept != draft[: len(kept)]:
        raise InvariantError(f"the runner kept {kept} for request {row.request}, and {draft} were drafted")
