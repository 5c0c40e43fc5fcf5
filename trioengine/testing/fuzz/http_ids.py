"""Judges operators' aborts by request ids, from the clients' own books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from trioengine.actors.engine import Engine
from trioengine.serve.limits import InFlight
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.http_client import HttpClient
from trioengine.testing.fuzz.http_exchange import Exchange


class AbortJudge:
    """Judges aborts by an id; several requests may have the same. Complaints are added to `crashes`.

    A stream names its request once its first event has arrived: an abort has to end the request if that goes on. Of
    other requests with this id nothing shows whether they have begun, or are over.
    """

    def __init__(self, engine: Engine, clients: Sequence[HttpClient], crashes: list[Exception]) -> None:
        self._engine = engine
        self._clients = clients
        self._crashes = crashes

    def known_ids(self) -> list[str]:
        """The ids of requests without a whole response; an id that several of them have comes first."""
        exchanges = [each for client in self._clients if not client.stream.closed for each in client.exchanges]
        counts = Counter(id for exchange in exchanges for id in sorted(exchange.ids))
        return [id for id, _ in counts.most_common()]

    def tap(self, abort: Callable[[InFlight, str], int]) -> Callable[[InFlight, str], int]:
        """For `replaced`: judge each call of `InFlight.abort`."""

        def judged(in_flight: InFlight, id: str) -> int:
            named = self._named(id)
            begun = [exchange for exchange in named if exchange.stream_id is not None]
            due = {exchange: self._num_going(exchange) for exchange in begun}
            aborted = abort(in_flight, id)
            least = sum(due.values())
            most = least + sum(exchange.num_choices for exchange in named if exchange not in due)
            if not least <= aborted <= most:
                self._complain(f"{aborted} requests with the id {id} are aborted, there are {least} to {most}")
            if left := [exchange for exchange in begun if self._num_going(exchange)]:
                self._complain(f"requests with the id {id} are aborted, and {len(left)} of them go on")
            for exchange in named:
                if due.get(exchange, aborted > least):
                    exchange.is_aborted = True
            return aborted

        return judged

    def _named(self, id: str) -> list[Exchange]:
        """The requests with this id, if the server may have them."""
        clients = (client for client in self._clients if not client.stream.closed)
        return [exchange for client in clients for exchange in client.exchanges if id in exchange.ids]

    def _num_going(self, exchange: Exchange) -> int:
        """How many requests of the engine an abort of this one would end, whose stream has begun."""
        id = exchange.stream_id
        labels = {id, *(f"{id}-{index}" for index in range(exchange.num_choices))}
        requests = inside.requests(self._engine)
        return sum(session.label in labels and inside.is_undecided(each) for session, each in requests)

    def _complain(self, complaint: str) -> None:
        self._crashes.append(AssertionError(complaint))
