"""Checks of grammars: each is compiled in a thread before its request goes to the worker, which compiles it again."""

from __future__ import annotations

from trioengine.actors.ports import Ports
from trioengine.core.grammar import Grammar

_KEPT = 256


class Grammars:
    """Knows the grammars that were good of late."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._good: dict[Grammar, None] = {}  # the latest last

    async def check(self, grammar: Grammar) -> None:
        """Raise RequestRejected(code="invalid_grammar") if it cannot be compiled. Cancelled, the result is dropped."""
        if grammar not in self._good:
            await self._ports.run_in_thread(_check, grammar)
        self._good.pop(grammar, None)
        self._good[grammar] = None
        if len(self._good) > _KEPT:
            del self._good[next(iter(self._good))]


def _check(grammar: Grammar) -> None:
    from trioengine.text.grammar import check_grammar  # not needed by most programs, and slow to import

    check_grammar(grammar)
