"""Bugs that other engines had, put back into this one: the fuzzer must find each of them.

A mutant replaces a piece of the engine, or of the worker's scheduling, while it is active; the engine knows nothing of
it. Its id is that of the failure's row in docs/fuzzing.md.
"""

from __future__ import annotations

import string

from trioengine.testing.mutants.gate import GATE_MUTANTS
from trioengine.testing.mutants.images import IMAGE_MUTANTS
from trioengine.testing.mutants.link import LINK_MUTANTS
from trioengine.testing.mutants.mutant import Mutant as Mutant
from trioengine.testing.mutants.power import POWER_MUTANTS
from trioengine.testing.mutants.replays import REPLAY_MUTANTS
from trioengine.testing.mutants.server import SERVER_MUTANTS
from trioengine.testing.mutants.session import SESSION_MUTANTS
from trioengine.testing.mutants.worker import WORKER_MUTANTS


def _row(mutant: Mutant) -> tuple[int, str]:
    number = mutant.id[1:].rstrip(string.ascii_lowercase)
    return int(number), mutant.id


_OF_THE_ENGINE = (*SESSION_MUTANTS, *GATE_MUTANTS, *POWER_MUTANTS, *REPLAY_MUTANTS)
_AROUND_IT = (*LINK_MUTANTS, *IMAGE_MUTANTS, *WORKER_MUTANTS, *SERVER_MUTANTS)
MUTANTS: dict[str, Mutant] = {mutant.id: mutant for mutant in sorted((*_OF_THE_ENGINE, *_AROUND_IT), key=_row)}
