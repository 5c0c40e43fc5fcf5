"""Rules of HTTP clients that ask for answers with more fields: choices, text completions, grammars and tools."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.core.lifecycle import Phase
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.faults import Harm
from trioengine.testing.fuzz.grammars import NAMES
from trioengine.testing.fuzz.http_client import HttpClient
from trioengine.testing.fuzz.http_exchange import RAW_PROMPTS, Ask
from trioengine.testing.fuzz.peers import WHICH
from trioengine.testing.fuzz.program import pick, recorded
from trioengine.testing.fuzz.served import ServedEnvironment
from trioengine.testing.fuzz.tools import CALLING, TOOL_USES

SEEDS = st.sampled_from((None, 7, 2**63 - 1))
ROUNDS_TO_AN_ECHO = 30  # at most


class ChoicesEnvironment(ServedEnvironment[HttpClient]):
    """Clients that ask; the base class of the machine `http`."""

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        prompt=st.sampled_from(("a", "be")),
        streams=st.booleans(),
        stop=st.sampled_from((None, "a", "e ", "th", "abcde")),
        min_tokens=st.sampled_from((0, 0, 2, 9)),
        stop_token=st.sampled_from((None, None, ord("e"), ord(" "))),
        top_logprobs=st.sampled_from((None, None, 0, 2)),
        choices=st.sampled_from((1, 1, 2, 3)),
        seed=SEEDS,
        shows_ids=st.sampled_from((False, False, True)),
        rounds=st.sampled_from((0, 0, 6, 9, 20)),
    )
    def ask_more(
        self,
        which: int,
        prompt: str,
        streams: bool,
        stop: str | None,
        min_tokens: int,
        stop_token: int | None,
        top_logprobs: int | None,
        choices: int,
        seed: int | None,
        shows_ids: bool,
        rounds: int,
    ) -> None:
        """A request with more fields."""
        ask = Ask(prompt, 20, streams, stop, min_tokens, stop_token, top_logprobs, has_usage=True)
        self._ask(which, replace(ask, n=choices, seed=seed, shows_ids=shows_ids), rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        prompts=st.sampled_from(("texts", "texts", *RAW_PROMPTS)),
        max_tokens=st.sampled_from((0, 1, 3, 20, 20)),
        echo=st.booleans(),
        top_logprobs=st.sampled_from((None, None, 0, 2)),
        choices=st.sampled_from((1, 1, 2)),
        seed=SEEDS,
        grammar=st.sampled_from(("", "", "", "unknown rule", "unknown rule", *NAMES)),
        streams=st.booleans(),
        shows_ids=st.sampled_from((False, False, True)),
        rounds=st.sampled_from((0, 6, 7, 8, 9, 20)),
    )
    def complete(
        self,
        which: int,
        prompts: str,
        max_tokens: int,
        echo: bool,
        top_logprobs: int | None,
        choices: int,
        seed: int | None,
        grammar: str,
        streams: bool,
        shows_ids: bool,
        rounds: int,
    ) -> None:
        """A text completion. Without a token to come, the prompts are echoed, and scored prompts have one choice."""
        ask = Ask("", max_tokens, streams, top_logprobs=top_logprobs, has_usage=True, seed=seed, shows_ids=shows_ids)
        grammar = "" if grammar == "object" or not max_tokens else grammar  # that one is in a field of chats
        ask = replace(ask, prompts=RAW_PROMPTS[prompts], echo=echo or not max_tokens, grammar=grammar)
        self._ask(which, replace(ask, n=1 if ask.is_scored else choices), rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        use=st.sampled_from((*CALLING, *TOOL_USES)),
        max_tokens=st.sampled_from((66, 66, 66, 57, 20)),
        choices=st.sampled_from((1, 1, 2)),
        seed=SEEDS,
        streams=st.sampled_from((True, True, False)),
        rounds=st.sampled_from((0, 0, 20, 80, 80)),
    )
    def ask_with_tools(
        self, which: int, use: str, max_tokens: int, choices: int, seed: int | None, streams: bool, rounds: int
    ) -> None:
        """A request with tools: the answer may call them, or have a text that only looks like a call."""
        ask = Ask("a", max_tokens, streams, has_usage=True, n=choices, seed=seed, tools=use, tool_form=self.tool_form)
        self._ask(which, ask, rounds)

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        grammar=st.sampled_from(NAMES),
        streams=st.booleans(),
        stop=st.sampled_from((None, None, "e")),
        min_tokens=st.sampled_from((0, 0, 9)),
        max_tokens=st.sampled_from((40, 12)),
        choices=st.sampled_from((1, 1, 2)),
        rounds=st.sampled_from((0, 0, 6, 9, 20)),
    )
    def ask_by_grammar(
        self,
        which: int,
        grammar: str,
        streams: bool,
        stop: str | None,
        min_tokens: int,
        max_tokens: int,
        choices: int,
        rounds: int,
    ) -> None:
        """A request for an answer that follows a grammar."""
        self._ask(which, Ask("be", max_tokens, streams, stop, min_tokens, grammar=grammar, n=choices), rounds)

    @precondition(lambda self: self.worker is not None and len(self.worker.compiler) > 0)
    @recorded()
    def compile(self) -> None:
        """One grammar is compiled in the worker, beside a step."""
        self._worker().compile()

    @precondition(lambda self: self.has_speakers)
    @recorded(
        which=WHICH,
        top_logprobs=st.sampled_from((0, 2)),
        rounds=st.sampled_from((0, 0, 1, 2, 3)),
        kills=st.sampled_from((True, True, False)),
    )
    def complete_scored(self, which: int, top_logprobs: int, rounds: int, kills: bool) -> None:
        """A streamed echo with log-probabilities, which may come before a token of its answer.

        The worker may die so many rounds after the prompt was scored.
        """
        ask = Ask("", 3, streams=True, top_logprobs=top_logprobs, has_usage=True, echo=True)
        self._ask(which, replace(ask, prompts=RAW_PROMPTS["chunks and token"]), 0)
        for _ in range(ROUNDS_TO_AN_ECHO):
            self.loop.settle()
            if inside.has_echo(self.engine):
                break
            self._move()
        if rounds:
            self._flow(rounds)
        if kills and self.worker is not None:
            self._kill(0)

    @precondition(lambda self: self.worker is not None and bool(self.running_choices))
    @recorded(which=WHICH)
    def fail_choice(self, which: int) -> None:
        """The worker is to fail one of several choices at its next token."""
        self.faults.strike(Harm.SAMPLING)
        request = inside.request_id(pick(self.running_choices, which))
        self._worker().runner.fail_requests.add(request)

    @property
    def running_choices(self) -> list[inside.SessionActor]:
        """The sessions of requests with several choices that run."""
        running = (each for each in inside.sessions(self.engine) if inside.phase(each) is Phase.RUNNING)
        return [session for session in running if self.requests.is_choice(session)]

    def _ask(self, which: int, ask: Ask, rounds: int, how: str = "whole") -> None:
        """A client sends a request; how far it gets is given."""
        pick(self.speakers, which).ask(ask, how)
        if rounds:
            self._flow(rounds)
