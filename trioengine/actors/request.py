"""The engine's record of one request: the one place of its state, its prepared prompt, its answer and its counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trioengine.actors.generation import ReadableRequest
from trioengine.actors.images import image_inputs
from trioengine.actors.observer import Observer
from trioengine.actors.request_times import RequestTimes, StepTimes
from trioengine.aio.concurrency import Deadline
from trioengine.core.errors import EngineError, Outcome, RequestRejected, SamplingFailed
from trioengine.core.ledger import RequestState
from trioengine.core.messages import INVALID_GRAMMAR, SAMPLING_FAILED, AddMessage, RequestFailed, TokensRow
from trioengine.core.sampling_params import ResolvedParams, SamplingParams, replace_valid
from trioengine.core.tools import NO_ANSWER, AskedTools, answer_fields
from trioengine.core.types import Cause, Chunk, Completion, FinishReason, Logprobs, PromptLogprobs, Usage
from trioengine.text.chat_tokenizer import PlacedImage
from trioengine.text.conversation import Conversation, Prepared
from trioengine.text.output import OutputText
from trioengine.text.tool_answer import ToolAnswer


@dataclass(slots=True)
class RecoveryRecord:
    """The deaths of workers that had the request in flight."""

    resumed: int = 0  # times that the request went on after one
    deaths: int = 0  # that count against it
    deaths_alone: int = 0  # while it was probed alone
    num_tokens: int = -1  # of its answer at the last one
    is_new: bool = False  # it has not gone on since the last one


class Owner(Protocol):
    """A request's session, as far as its reader needs it; the session's own module imports this one."""

    def abort_request(self, request: Request, cause: Cause) -> bool:
        """Abort the request if it has no outcome. Returns whether this call aborts it."""
        ...

    def leave(self, request: Request) -> None:
        """The reader goes: without an outcome the request is aborted now."""
        ...


class Request(ReadableRequest):
    """A request of a session. Its session alone changes it; its reader, the Generation, only takes the unread part.

    `state` is where it stands among those in flight; `outcome` is decided once, and may come before the worker has
    finished with the request (`settled`).
    """

    __slots__ = (
        "_has_read_prompt",
        "_logprobs",
        "_num_texts_read",
        "_num_tokens_read",
        "_prompt_logprobs",
        "abort_cause",
        "embedding",
        "eos_token_ids",
        "grammar",
        "leader",
        "output",
        "prepared",
        "recovery",
        "resolved",
        "session",
        "state",
        "texts",
        "times",
        "tool_answer",
        "tools",
        "usage",
        "weight_versions",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        session: Owner,
        observers: Sequence[Observer],
        keep_partial: bool = False,
        deadline: Deadline,
        wait: bool | None = None,
        label: str | None = None,
        leader: Request | None = None,
        tools: AskedTools | None = None,
    ) -> None:
        super().__init__(params, keep_partial=keep_partial, deadline=deadline, wait=wait, label=label)
        self.state = RequestState.PREPARING
        self.leader = leader  # whose prompt this one has; it goes to the worker behind that
        self.prepared: Prepared | None = None
        self.tools = tools
        self.output: OutputText | None = None
        self.texts: list[str] = []  # the pieces of the text, as the reader gets them
        self.tool_answer: ToolAnswer | None = None  # with tools: the output divided into text and calls
        self.grammar = params.grammar  # which the answer follows: the caller's, or one that forces calls
        self.resolved: ResolvedParams | None = None
        self.eos_token_ids: tuple[int, ...] = ()  # of the model
        self.embedding: bytes | None = None  # of the prompt, by an embedding model
        self.usage: Usage | None = None  # of the first attachment that produced a token
        self.weight_versions: list[int] = []
        self.recovery = RecoveryRecord()
        self.abort_cause = Cause.CLIENT
        self.times = RequestTimes(observers)
        self.session = session
        self._logprobs: list[Logprobs] = []  # one a token, if asked for
        self._prompt_logprobs: list[Logprobs | None] = [None]  # of the first tokens of the prompt, if asked for
        self._num_tokens_read = 0
        self._num_texts_read = 0
        self._has_read_prompt = params.prompt_logprobs is None  # nothing of the prompt is left to be read

    # ---- the reader's side ------------------------------------------------------------------------------------------

    @property
    def progress(self) -> str:
        return self.state.value

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return tuple(self.prepared.token_ids) if self.prepared is not None else ()

    @property
    def has_unread(self) -> bool:
        output = self.output
        return output is not None and (
            self._num_tokens_read < len(output.token_ids)
            or self._num_texts_read < len(self.texts)
            or (self.tool_answer is not None and self.tool_answer.calls.has_unread)
            or (not self._has_read_prompt and self._has_prompt_logprobs)
        )

    def read_nowait(self) -> Chunk:
        first = self._num_tokens_read
        prompt_logprobs = None if self._has_read_prompt else self.prompt_logprobs
        calls = () if self.tool_answer is None else self.tool_answer.calls.read()
        text = self.read_text_nowait()
        ids = tuple(self.output.token_ids[first:]) if self.output is not None else ()
        logprobs = tuple(self._logprobs[first:]) if self.params.logprobs is not None else None
        return Chunk(text, ids, logprobs, prompt_logprobs, calls)

    def read_text_nowait(self) -> str:
        output = self.output
        if output is None:
            return ""
        texts = self.texts[self._num_texts_read :]
        self._num_tokens_read, self._num_texts_read = len(output.token_ids), len(self.texts)
        self._has_read_prompt = self._has_read_prompt or self._has_prompt_logprobs  # once, also after a death
        return "".join(texts)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Of all tokens of the prompt; None if they were not asked for, or did not all come."""
        return tuple(self._prompt_logprobs) if self._has_prompt_logprobs else None

    @property
    def _has_prompt_logprobs(self) -> bool:
        is_asked = self.params.prompt_logprobs is not None
        return is_asked and 0 < self.num_prompt_tokens == len(self._prompt_logprobs)

    def abort(self, cause: Cause) -> bool:
        return self.session.abort_request(self, cause)

    def leave(self) -> None:
        self.session.leave(self)

    def completion(self, outcome: Outcome) -> Completion:
        assert self.id is not None, "a request with an outcome has its id"
        output, prepared, usage = self.output, self.prepared, self.usage
        ids = tuple(output.token_ids) if output is not None else ()
        cached_tokens = usage.cached_tokens if usage is not None else 0
        times = (usage.queue_time, usage.prefill_time) if usage is not None else (0.0, 0.0)
        return Completion(
            request_id=self.id,
            text="".join(self.texts),
            token_ids=ids,
            logprobs=tuple(self._logprobs) if self.params.logprobs is not None else None,
            finish_reason=outcome.finish_reason,
            cause=outcome.cause,
            usage=Usage(self.num_prompt_tokens, len(ids), cached_tokens, *times),
            resumed=self.recovery.resumed,
            weight_versions=tuple(self.weight_versions),
            dropped_turns=prepared.dropped_turns if prepared is not None else 0,
            stop_reason=output.stop_reason if output is not None else None,
            decode_time=self.times.decode_time,
            prompt_logprobs=self.prompt_logprobs,
            tool_calls=() if self.tool_answer is None else self.tool_answer.calls.whole,
        )

    # ---- the session's side -----------------------------------------------------------------------------------------

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 before it is prepared."""
        return len(self.prepared.token_ids) if self.prepared is not None else 0

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images of the prompt; () before it is prepared."""
        return self.prepared.images if self.prepared is not None else ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.output.token_ids) if self.output is not None else 0

    def message(self, session: int, base: int, mint: Callable[[], int]) -> AddMessage:
        """ADD_MESSAGE of the prompt and the delivered part of the answer, after the first `base` tokens.

        The logprobs of the prompt, which are there in whole when an answer has begun, are else computed anew.
        """
        prepared, output, params = self.prepared, self.output, self.resolved
        assert self.id is not None and prepared is not None and output is not None and params is not None
        if output.token_ids and params.prompt_logprobs is not None:
            params = replace_valid(params, prompt_logprobs=None)
        self._prompt_logprobs = self._prompt_logprobs if output.token_ids else [None]
        ids = prepared.token_ids[base:]
        ids.extend(output.token_ids)
        return AddMessage(
            session=session,
            request=self.id,
            base=base,
            token_ids=ids,
            params=params,
            eos_token_ids=self.eos_token_ids,
            num_output=len(output.token_ids),
            images=image_inputs(self.images, params.cache_salt, mint) if self.images else (),
        )

    def receive_prompt(self, row: TokensRow, logprobs: Sequence[Logprobs]) -> bool:
        """Take a row's logprobs of the prompt, unless there is an outcome. Returns whether the row has an answer."""
        if self.outcome is None:
            self._prompt_logprobs.extend(logprobs)
        return len(row.token_ids) > 0 or row.finish_reason is not None

    def receive(self, row: TokensRow, step: StepTimes) -> Outcome | None:
        """Take a row's tokens into the answer. Returns the outcome if the row ends it, or completes a stop string."""
        output = self.output
        assert output is not None, "rows come after the commit"
        finish_reason = row.finish_reason
        if finish_reason is not FinishReason.ABORT:
            self.times.on_tokens(step, row.usage, are_first=not output.token_ids)
        if finish_reason is None:
            stopped = output.feed(row.token_ids)
        else:
            stopped = output.finish(row.token_ids, ended_by_token=finish_reason is FinishReason.STOP)
            self.embedding = row.embedding
        if self.tool_answer is not None:
            self.tool_answer.take(output.texts)
        if row.logprobs is not None:  # of the tokens that were taken
            self._logprobs.extend(row.logprobs[: len(output.token_ids) - len(self._logprobs)])
        if stopped:
            return Outcome(FinishReason.STOP)
        if finish_reason is None:
            return None
        return Outcome(finish_reason, self.abort_cause if finish_reason is FinishReason.ABORT else None)

    def cut_short(self, cause: Cause, conversation: Conversation | None) -> None:
        """Abort the request now, with the part of the answer that was received; nothing if it has an outcome."""
        if self.outcome is not None:
            return
        if self.output is not None:
            self.output.flush()  # a stop string or a character held text back that belongs to tokens that came
        self.conclude(Outcome(FinishReason.ABORT, cause), conversation)

    def conclude(self, outcome: Outcome, conversation: Conversation | None) -> None:
        """Set the outcome, and commit the turn to the conversation unless it is taken back."""
        is_kept = outcome.finish_reason is not FinishReason.ABORT or self.keep_partial
        output, answer = self.output, None
        if self.tool_answer is not None and output is not None:
            outcome, answer = self._divided(outcome, self.tool_answer, output)
            is_kept = is_kept and (outcome.is_complete or answer != NO_ANSWER)
        if (
            is_kept
            and conversation is not None
            and self.prepared is not None
            and output is not None
            and output.token_ids
        ):
            conversation.commit(self.prepared, output.token_ids, output.text, answer)
        self.set_outcome(outcome)

    def _divided(self, outcome: Outcome, answer: ToolAnswer, output: OutputText) -> tuple[Outcome, dict[str, Any]]:
        """Return the outcome of an answer that may have calls, and the fields of its message."""
        answer.take(output.texts)
        answer.finish(is_aborted=outcome.finish_reason is FinishReason.ABORT)
        calls = answer.calls.whole
        if calls and outcome.finish_reason is FinishReason.STOP:
            outcome = Outcome(FinishReason.TOOL_CALLS)
        return outcome, answer_fields(answer.text, calls)

    def fail(self, failure: RequestFailed) -> None:
        """Set the outcome of a request that the worker could not run."""
        error: EngineError = SamplingFailed(failure.message)
        if failure.code == INVALID_GRAMMAR:
            error = self.grammar_error(RequestRejected(failure.code, failure.message, param="grammar"))
        elif failure.code != SAMPLING_FAILED:
            error = RequestRejected(failure.code, failure.message)
        self.set_outcome(Outcome(FinishReason.ERROR, error=error))

    def grammar_error(self, error: RequestRejected) -> RequestRejected:
        """Return the error of the grammar under the name of the argument that it was made of."""
        if self.params.grammar is not None:
            return error
        return RequestRejected(error.code, error.message.replace("grammar", "tools", 1), param="tools")

    def add_weights(self, version: int) -> None:
        """Record the version of the weights that computed the tokens from here on."""
        if not self.weight_versions or self.weight_versions[-1] != version:
            self.weight_versions.append(version)

    def report_end(self) -> None:
        """Report a request to the observers if it ran to its own end."""
        if self.outcome is not None and self.outcome.is_complete:
            self.times.finish(self.num_prompt_tokens, self.num_tokens)
