"""The worker without its process: messages and other events in, steps, messages out.

Shared by the real worker (worker/process.py) and the simulated one (trioengine.testing), which differ in the runner,
the clock and the transport. Synchronous: a step is one call, and messages are handled between steps, in the order of
arrival.

Before the memory sleeps or the weights change all sessions have ended, and then the prefix cache is dropped, so that
nothing computed before can be used after.

A session's tokens are always: the tokens before, truncated to the last ADD_MESSAGE's `base`, then that message's
tokens, then every token of every row sent for it. The engine computes the same from the messages of both directions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from trioengine.core.connection import MIN_FRAME_LIMIT
from trioengine.core.errors import InvariantError, ModelError, RemoteProtocolError, RequestRejected
from trioengine.core.messages import (
    ADAPTER_FAILED,
    INVALID_GRAMMAR,
    NO_ADAPTER,
    WIRE_NAMES,
    Adapter,
    AddMessage,
    AddSession,
    Audit,
    Audited,
    EndSession,
    FromWorker,
    RequestFailed,
    SessionEnded,
    Sleep,
    Slept,
    StopSession,
    Tokens,
    TokensRow,
    ToWorker,
    Updated,
    UpdateWeights,
    Wake,
    Woken,
    WorkerStatistics,
)
from trioengine.core.power import ALL_TAGS, Tag
from trioengine.core.types import FinishReason, TokenIds, token_ids
from trioengine.worker.scheduling.adapters import Adapters
from trioengine.worker.scheduling.grammars import Compiler, GrammarCompiled, NoCompiler
from trioengine.worker.scheduling.image_queue import Decoder, PictureDecoded
from trioengine.worker.scheduling.images import PayloadArrived, place_images
from trioengine.worker.scheduling.runner_interface import ModelRunner
from trioengine.worker.scheduling.scheduler import Scheduler
from trioengine.worker.scheduling.sequence import Limits, Sequence, SequenceStatus

Event: TypeAlias = ToWorker | PayloadArrived | PictureDecoded | GrammarCompiled
EMBEDDING_BYTES = MIN_FRAME_LIMIT // 2  # of embeddings in a message; the rest of a frame is for its other fields
INVALID_IMAGE = "invalid_image"  # the code of a request with an image that cannot be decoded


@dataclass(slots=True)
class _Session:
    """An attached session; while a request is in flight its sequence owns the tokens."""

    held: TokenIds = field(default_factory=token_ids)  # packed: an idle session costs 4 bytes a token
    sequence: Sequence | None = None
    adapter: Adapter | None = None


class EngineCore:
    """Sessions and their requests over one scheduler and one runner.

    `clock` gives seconds from any origin, for the times in Usage only. `asleep` are the parts that the runner has not
    loaded. `decoder` and `compiler` report to `handle`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        limits: Limits,
        clock: Callable[[], float],
        asleep: frozenset[Tag] = frozenset(),
        decoder: Decoder | None = None,
        compiler: Compiler | None = None,
    ) -> None:
        self.limits = limits
        self._runner = runner
        self._clock = clock
        self._scheduler = Scheduler(limits, decoder, runner)
        self._adapters = Adapters(runner)
        self._compiler = NoCompiler() if compiler is None else compiler
        self._sessions: dict[int, _Session] = {}
        self._asleep = asleep

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._scheduler.has_work

    @property
    def sessions(self) -> frozenset[int]:
        """The live sessions."""
        return frozenset(self._sessions)

    @property
    def requests(self) -> tuple[int, ...]:
        """The requests in flight, in any order."""
        return self._scheduler.requests

    @property
    def num_payloads(self) -> int:
        """The number of payloads that have come and are not consumed."""
        return self._scheduler.payloads.num_held

    def statistics(self) -> WorkerStatistics:
        """The current counts."""
        return self._scheduler.statistics(len(self._sessions))

    def held_tokens(self, session: int) -> TokenIds:
        """A copy of the tokens that a live session holds; KeyError for any other."""
        state = self._sessions[session]
        return state.held[:] if state.sequence is None else token_ids(state.sequence.token_ids)

    def handle(self, event: Event) -> list[FromWorker]:
        """Apply a message about sessions or memory, or an event of an image, and return the replies.

        Raises RemoteProtocolError, and nothing changes, for messages that the engine must not send: of unknown
        sessions, a second request of a session, a `base` beyond its tokens, a SLEEP or UPDATE_WEIGHTS while there are
        sessions, or a message about neither. Payloads and images that differ from their announcement also raise it,
        and may leave changes. Exceptions of the runner's `sleep` pass through.
        """
        replies: list[FromWorker] = []
        match event:
            case AddSession():
                self._add_session(event)
            case AddMessage():
                replies += self._add_message(event)
            case StopSession():
                replies += self._stop_session(event)
            case EndSession():
                replies.append(self._end_session(event))
            case Audit():
                replies.append(self._audit(event))
            case Sleep():
                replies.append(self._sleep())
            case Wake():
                replies.append(self._wake(event))
            case UpdateWeights():
                replies.append(self._update_weights(event))
            case PayloadArrived():
                self._scheduler.take_payload(event)
            case PictureDecoded():
                replies += self._take_decoded(event)
            case GrammarCompiled():
                replies += self._take_compiled(event)
            case _:
                raise RemoteProtocolError(f"{WIRE_NAMES[type(event)]} is about neither sessions nor memory")
        if self._scheduler.payloads.consumed:
            replies += self._scheduler.payloads.take_consumed()
        return replies

    def step(self) -> list[FromWorker]:
        """Schedule, run and apply one step. An exception of the runner passes through and leaves the core unusable.

        TOKENS with a row for each sequence that sampled or got logprobs of its prompt, a REQUEST_FAILED for each
        that the runner could not compute them for, PAYLOAD_CONSUMED for images that are encoded; nothing when there is
        nothing to do.
        """
        started = self._clock()
        output = self._scheduler.schedule()
        if output is None:
            return [*self._scheduler.payloads.take_consumed()]
        if self._asleep:
            raise InvariantError(f"a step while {', '.join(sorted(tag.value for tag in self._asleep))} sleep")
        for entry in output.scheduled:
            if entry.sequence.started_at is None:
                entry.sequence.started_at = started
        sampled = self._runner.execute(output)
        now = self._clock()
        rows: list[TokensRow] = []
        failures: list[FromWorker] = []
        for sequence, row in zip(self._scheduler.update(output, sampled), sampled, strict=True):
            if isinstance(row, RequestFailed):
                failures.append(row)
            else:
                rows.append(row)
                if sequence.first_token_at is None and (row.token_ids or row.finish_reason is not None):
                    sequence.first_token_at = now
                if row.finish_reason is not None or sequence.num_output_tokens == len(row.token_ids) > 0:
                    row.usage = sequence.usage(now)
            if sequence.status is SequenceStatus.FINISHED:
                self._take_back(sequence)
        replies = [*self._tokens(rows), *failures]
        if self._scheduler.payloads.consumed:
            replies += self._scheduler.payloads.take_consumed()
        return replies

    def _tokens(self, rows: list[TokensRow]) -> Iterator[FromWorker]:
        """The message of a step's rows; several for more embeddings than fit a frame."""
        statistics, at_once = self.statistics(), len(rows)
        if rows and self.limits.embeds:
            at_once = max(1, EMBEDDING_BYTES // max(len(row.embedding or b"\0") for row in rows))
        for start in range(0, max(1, len(rows)), max(1, at_once)):
            yield Tokens(tuple(rows[start : start + at_once]), statistics)

    def check_integrity(self) -> None:
        """Raise InvariantError unless the accounts of the scheduler, the blocks, images and adapters agree."""
        self._scheduler.check_integrity()
        self._adapters.check_integrity(
            Counter(session.adapter.id for session in self._sessions.values() if session.adapter is not None)
        )

    def prepare(self) -> bool:
        """Prepare one more thing for later steps, if any is missing; returns whether it did. For an idle worker."""
        return self._runner.prepare()

    # ---- messages ---------------------------------------------------------------------------------------------------

    def _add_session(self, message: AddSession) -> None:
        if message.session in self._sessions:
            raise RemoteProtocolError(f"ADD_SESSION: session {message.session} is there already")
        self._sessions[message.session] = _Session(adapter=message.adapter)
        if message.adapter is not None:
            self._adapters.hold(message.adapter)

    def _add_message(self, message: AddMessage) -> list[FromWorker]:
        session = self._session(message.session, "ADD_MESSAGE")
        if session.sequence is not None:
            raise RemoteProtocolError(f"ADD_MESSAGE: session {message.session} runs {session.sequence.request}")
        if not 0 <= message.num_output <= len(message.token_ids):
            raise RemoteProtocolError(
                f"ADD_MESSAGE: {message.num_output} of {len(message.token_ids)} tokens are output"
            )
        if not 0 <= message.base <= len(session.held):
            raise RemoteProtocolError(
                f"ADD_MESSAGE: base {message.base}, and session {message.session} holds {len(session.held)} tokens"
            )
        if message.params.embeds is not self.limits.embeds:
            raise RemoteProtocolError(f"ADD_MESSAGE: request {message.request} is not for a model of this kind")
        pictures = self._scheduler.pictures.find(message.images) if message.images else ()
        del session.held[message.base :]
        session.held.extend(message.token_ids)
        num_prompt_tokens = len(session.held) - message.num_output
        try:
            adapter = self._use_adapter(session.adapter)
            sequence = Sequence(
                session=message.session,
                request=message.request,
                token_ids=session.held.tolist(),
                num_prompt_tokens=num_prompt_tokens,
                params=message.params,
                eos_token_ids=frozenset(message.eos_token_ids),
                arrived_at=self._clock(),
                images=place_images(message.images, pictures, num_prompt_tokens, self.limits.tile)
                if pictures
                else None,
                adapter=adapter,
            )
            self._scheduler.add(sequence)
        except RequestRejected as exc:
            return [RequestFailed(message.session, message.request, exc.code, exc.message)]
        finally:
            if message.images:
                self._scheduler.announce(message.images)
        session.sequence = sequence
        session.held = token_ids()
        if sequence.is_compiling:
            self._compiler.submit(sequence)
        return []

    def _use_adapter(self, adapter: Adapter | None) -> int:
        """The number of the adapter, which is loaded now. Raises RequestRejected if it cannot be."""
        if adapter is None:
            return NO_ADAPTER
        try:
            return self._adapters.use(adapter)
        except ModelError as exc:
            raise RequestRejected(ADAPTER_FAILED, str(exc)) from exc

    def _stop_session(self, message: StopSession) -> list[FromWorker]:
        session = self._session(message.session, "STOP_SESSION")
        sequence = session.sequence
        if sequence is None or sequence.request != message.request:
            return []
        self._scheduler.abort(message.request)
        self._take_back(sequence)
        row = TokensRow(
            session=message.session,
            request=message.request,
            token_ids=token_ids(),
            finish_reason=FinishReason.ABORT,
            usage=sequence.usage(self._clock()),
        )
        return [Tokens((row,), self.statistics())]

    def _end_session(self, message: EndSession) -> SessionEnded:
        session = self._session(message.session, "END_SESSION")
        if session.sequence is not None:
            self._scheduler.abort(session.sequence.request)
        del self._sessions[message.session]
        if session.adapter is not None:
            self._adapters.release(session.adapter)
        return SessionEnded(message.session, self.statistics())

    def _audit(self, message: Audit) -> Audited:
        blocks = self._scheduler.blocks
        return Audited(
            audit=message.audit,
            sessions=tuple(sorted(self._sessions)),
            requests=tuple(sorted(self.requests)),
            kv_blocks_total=blocks.full.num_blocks,
            kv_blocks_free=blocks.full.num_free,
            kv_blocks_cached=blocks.full.num_cached,
            kv_blocks_held=blocks.full.num_held,
            payloads=self._scheduler.payloads.outstanding,
            state_slots_total=blocks.states.num_slots,
            state_slots_free=blocks.states.num_free,
            state_slots_kept=blocks.states.num_kept,
            state_slots_held=blocks.states.num_held,
            window_blocks_total=blocks.windowed.num_blocks,
            window_blocks_free=blocks.windowed.num_free,
            window_blocks_cached=blocks.windowed.num_cached,
            window_blocks_held=blocks.windowed.num_held,
        )

    # ---- grammars ---------------------------------------------------------------------------------------------------

    def _take_compiled(self, compiled: GrammarCompiled) -> list[FromWorker]:
        sequence, constraint = compiled.sequence, compiled.constraint
        if sequence.status is SequenceStatus.FINISHED:
            return []
        if constraint is None:
            self._scheduler.abort(sequence.request)
            self._take_back(sequence)
            return [sequence.failure(INVALID_GRAMMAR, compiled.error)]
        constraint.advance(sequence.output)  # of a request that goes on after the loss of another worker
        self._scheduler.take_compiled(sequence, constraint)
        return []

    # ---- images -----------------------------------------------------------------------------------------------------

    def _take_decoded(self, decoded: PictureDecoded) -> list[FromWorker]:
        sequence = self._scheduler.take_decoded(decoded)
        if sequence is None or sequence.images is None:
            return []
        self._take_back(sequence)
        return [sequence.failure(INVALID_IMAGE, f"{sequence.images.name(decoded.picture)}: {decoded.error}")]

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _sleep(self) -> Slept:
        self._forget_all("SLEEP")
        self._asleep = ALL_TAGS
        self._runner.sleep()
        return Slept()

    def _wake(self, message: Wake) -> Woken:
        tags = frozenset(message.tags)
        try:
            self._runner.wake(tags)
        except ModelError as exc:
            return Woken(str(exc))
        self._asleep -= tags
        return Woken(None)

    def _update_weights(self, message: UpdateWeights) -> Updated:
        self._forget_all("UPDATE_WEIGHTS")
        try:
            return Updated(None, self._runner.update_weights(message.path))
        except ModelError as exc:
            return Updated(str(exc))

    def _forget_all(self, name: str) -> None:
        if self._sessions:
            raise RemoteProtocolError(f"{name} while {len(self._sessions)} sessions are there")
        self._scheduler.forget_all()
        self._adapters.drop_all()

    def _session(self, session: int, name: str) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            raise RemoteProtocolError(f"{name}: session {session} is not there")
        return state

    def _take_back(self, sequence: Sequence) -> None:
        """Return the tokens of a finished request from its sequence to the session."""
        session = self._sessions[sequence.session]
        session.held = token_ids(sequence.token_ids)
        session.sequence = None
