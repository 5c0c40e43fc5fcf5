"""Bugs that other engines had, put back into this one: the fuzzer must find each of them.

A mutant replaces a piece of the engine, or of the worker's scheduling, while it is active; the engine knows nothing of
it. Its id is that of the failure's row in docs/fuzzing.md.
"""

from __future__ import annotations

import string

from adapter_mutants import ADAPTER_MUTANTS
from choice_mutants import CHOICE_MUTANTS
from client_mutants import CLIENT_MUTANTS
from gate_mutants import GATE_MUTANTS
from grammar_mutants import GRAMMAR_MUTANTS
from image_mutants import IMAGE_MUTANTS
from link_mutants import LINK_MUTANTS
from mutant import Mutant as Mutant
from power_mutants import POWER_MUTANTS
from replay_mutants import REPLAY_MUTANTS
from resume_mutants import RESUME_MUTANTS
from server_mutants import SERVER_MUTANTS
from session_mutants import SESSION_MUTANTS
from state_mutants import STATE_MUTANTS
from text_mutants import TEXT_MUTANTS
from tool_mutants import TOOL_MUTANTS
from window_mutants import WINDOW_MUTANTS
from worker_mutants import WORKER_MUTANTS


def _row(mutant: Mutant) -> tuple[int, str]:
    number = mutant.id[1:].rstrip(string.ascii_lowercase)
    return int(number), mutant.id


_OF_THE_ENGINE = (*SESSION_MUTANTS, *GATE_MUTANTS, *POWER_MUTANTS, *REPLAY_MUTANTS)
_AROUND_IT = (
    *LINK_MUTANTS,
    *IMAGE_MUTANTS,
    *WORKER_MUTANTS,
    *STATE_MUTANTS,
    *WINDOW_MUTANTS,
    *ADAPTER_MUTANTS,
    *SERVER_MUTANTS,
    *RESUME_MUTANTS,
    *TEXT_MUTANTS,
    *CLIENT_MUTANTS,
    *GRAMMAR_MUTANTS,
    *CHOICE_MUTANTS,
    *TOOL_MUTANTS,
)
_ALL = (*_OF_THE_ENGINE, *_AROUND_IT)
MUTANTS: dict[str, Mutant] = {mutant.id: mutant for mutant in sorted(_ALL, key=_row)}
