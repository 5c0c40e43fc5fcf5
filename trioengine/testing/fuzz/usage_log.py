"""The tokens and seconds of requests by arithmetic of their own, from the messages and steps of simulated workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import trio

from trioengine.actors.engine import Engine
from trioengine.actors.observer import FinishedRequest, Observer
from trioengine.actors.statistics import Statistics
from trioengine.core.lifecycle import Attachment, Event, Phase
from trioengine.core.messages import AddMessage, Message, Tokens
from trioengine.core.types import Completion, Usage
from trioengine.testing.fuzz import inside
from trioengine.testing.simulated_worker import Handled, SimulatedWorker, WorkerObserver

ROUNDING = 1e-6  # seconds
COUNTERS = (  # of Statistics: they only grow
    *("received", "finished", "aborted", "failed", "rejected", "incarnation", "restarts"),
    *("prompt_tokens", "generation_tokens", "preemptions", "prefix_cache_queries", "prefix_cache_hits"),
    *("encoder_cache_queries", "encoder_cache_hits", "draft_tokens", "accepted_tokens"),
)


class _Attempt:
    """A request on one worker."""

    def __init__(self, num_prompt_tokens: int, *, is_new: bool) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.is_new = is_new  # without a part of its answer
        self.arrived = trio.current_time()
        self.started: float | None = None
        self.first_token: float | None = None
        self.cached_tokens = 0

    @property
    def expected(self) -> tuple[int, float, float]:
        """Cached tokens, queue time and prefill time, once it has a token."""
        assert self.started is not None and self.first_token is not None, "it has a token"
        return self.cached_tokens, self.started - self.arrived, self.first_token - self.started


class UsageLog(WorkerObserver, Observer):
    """All requests of one engine as its workers had them, and the totals of each worker."""

    def __init__(self) -> None:
        self._attempts: dict[int, list[_Attempt]] = {}  # of each request, one a worker that was to compute it
        self._of_worker: dict[SimulatedWorker, dict[int, _Attempt]] = {}
        self._totals: dict[SimulatedWorker, Counter[str]] = {}
        self._before: dict[SimulatedWorker, dict[str, int]] = {}  # the engine's counts, without this worker's own
        self._latest: Statistics | None = None
        self._lost: set[int] = set()  # requests whose worker was lost, and that have not gone on
        self._resumed: Counter[int] = Counter()  # how often each has gone on after that
        self._observed = Counter(steps=0, step_tokens=0)
        self._begins: set[float] = set()  # when requests were created, which are entered in the same step
        self._token_times: set[float] = set()  # when parts of answers came
        self._num_begun = 0  # answers
        self._finished: Counter[tuple[int, int]] = Counter()  # tokens of prompt and answer, as they were observed

    # ---- events ---------------------------------------------------------------------------------------------------

    def handling(self, worker: SimulatedWorker, event: Handled) -> None:
        if not isinstance(event, AddMessage):
            return
        num_tokens = event.base + len(event.token_ids) - event.num_output
        attempt = _Attempt(num_tokens, is_new=not event.num_output)
        self._attempts.setdefault(event.request, []).append(attempt)
        self._of_worker.setdefault(worker, {})[event.request] = attempt

    def sending(self, worker: SimulatedWorker, messages: Sequence[Message]) -> None:
        """Take in a step: the sequences that began with it, and the tokens that it has sampled."""
        now, attempts = trio.current_time(), self._of_worker.get(worker, {})
        if worker not in self._totals:
            self._totals[worker] = Counter()
        totals = self._totals[worker]
        totals["steps"], totals["step_tokens"] = worker.runner.num_steps, worker.runner.num_computed
        for request, num_tokens, cached_tokens in worker.runner.take_begun():
            attempt = attempts[request]
            attempt.started, attempt.cached_tokens = now, cached_tokens
            totals["prefix_cache_queries"] += num_tokens
            totals["prefix_cache_hits"] += cached_tokens
        for row in (row for message in messages if isinstance(message, Tokens) for row in message.rows):
            attempt = attempts[row.request]
            totals["generation_tokens"] += len(row.token_ids)
            if len(row.token_ids) and attempt.first_token is None:
                attempt.first_token = now
                totals["prompt_tokens"] += attempt.num_prompt_tokens if attempt.is_new else 0

    def session_moved(self, actor: object, phase: Phase, attachment: Attachment, event: Event) -> None:
        if event is Event.WORKER_LOST and phase is Phase.RUNNING:
            self._lost.add(inside.request_id(actor))
        elif event is Event.RESUME and (request := inside.request_id(actor)) in self._lost:
            self._lost.remove(request)
            self._resumed[request] += 1

    def step(self, num_tokens: int) -> None:
        self._observed.update(steps=1, step_tokens=num_tokens)

    def request_created(self, generation: object) -> None:
        self._begins.add(trio.current_time())

    def first_token(self, seconds: float, usage: Usage | None) -> None:
        now = trio.current_time()
        assert _is_among(now - seconds, self._begins), f"none was asked for {seconds:g} s ago: {self._begins}"
        self._token_times.add(now)
        self._num_begun += 1

    def next_tokens(self, gaps: Sequence[float]) -> None:
        now = trio.current_time()
        for gap in gaps:
            assert _is_among(now - gap, self._token_times), f"no token came {gap:g} s ago: {self._token_times}"
        self._token_times.add(now)

    def request_finished(self, request: FinishedRequest) -> None:
        assert 0.0 <= request.decode_seconds <= request.seconds, f"the times of a request do not fit: {request}"
        times = self._token_times
        fits = any(  # the latest token, which came before this step if the engine has ended the answer
            _is_among(latest - request.seconds, self._begins) and _is_among(latest - request.decode_seconds, times)
            for latest in times
        )
        assert fits, f"no request began and got tokens at such times: {request}"
        self._finished[request.prompt_tokens, request.generation_tokens] += 1

    def session_stopped(self, seconds: float) -> None:
        assert seconds >= 0.0, f"a stop took {seconds:g} s"

    # ---- checks ---------------------------------------------------------------------------------------------------

    def check(self, completion: Completion, num_prompt_tokens: int) -> None:
        """The usage of an answer, whole or not, matches a worker that computed it."""
        usage, request = completion.usage, completion.request_id
        due = self._resumed[request]
        assert completion.resumed == due, f"request {request} went on with {due} workers more, not {completion.resumed}"
        assert usage.completion_tokens == len(completion.token_ids), f"{completion.token_ids} are counted as {usage}"
        assert usage.prompt_tokens in (0, num_prompt_tokens), f"the prompt has {num_prompt_tokens} tokens, not {usage}"
        found = usage.cached_tokens, usage.queue_time, usage.prefill_time
        if completion.token_ids:
            assert usage.prompt_tokens, f"it has an answer, and no prompt: {usage}"
            known = [each.expected for each in self._attempts[request] if each.first_token is not None]
            fits = [all(abs(x - y) <= ROUNDING for x, y in zip(found, each, strict=True)) for each in known]
            assert any(fits), f"request {request} has {usage}, by its workers (cached, queued, prefilled) {known}"
        assert 0 <= usage.cached_tokens <= num_prompt_tokens, f"of {num_prompt_tokens} tokens are cached: {usage}"
        assert usage.queue_time >= 0.0 and usage.prefill_time >= 0.0, f"negative times: {usage}"

    def check_counters(self, engine: Engine) -> None:
        """No counter has gone down."""
        before, self._latest = self._latest, engine.statistics()
        if before is not None:
            lower = [name for name in COUNTERS if getattr(self._latest, name) < getattr(before, name)]
            assert not lower, f"counters go down: {lower}, from {before} to {self._latest}"

    def check_totals(self, engine: Engine, worker: SimulatedWorker) -> None:
        """At rest, the worker is well: the engine's counts have grown by as much as the worker has done."""
        statistics, totals = engine.statistics(), self._totals.get(worker, Counter())
        names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
        counts = {name: getattr(statistics, name) for name in names} | self._observed
        others = {name: count - totals[name] for name, count in counts.items()}
        before = self._before.setdefault(worker, others)
        assert others == before, f"this worker did {totals}, the others did {before}, and the engine has {statistics}"
        gone = [each for each in self._totals if each is not worker]
        most = {name: sum(self._totals[each][name] for each in gone) for name in counts}
        too_many = [name for name in counts if not 0 <= others[name] <= most[name]]
        assert not too_many, f"workers that are gone did {most}, and the engine counts {others} for them"

    def check_finished(self, completions: Sequence[Completion], num_begun: int) -> None:
        """All are over: each answer was reported once as it began, and with its tokens as it ran to its end."""
        assert self._num_begun == num_begun, f"{num_begun} answers have begun, observers got {self._num_begun}"
        due = Counter((each.usage.prompt_tokens, each.usage.completion_tokens) for each in completions)
        assert self._finished == due, f"observers got finished requests of {self._finished} tokens, callers of {due}"


def _is_among(moment: float, times: Set[float]) -> bool:
    return any(abs(moment - each) <= ROUNDING for each in times)
