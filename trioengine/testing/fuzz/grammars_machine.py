"""Sessions under hypothesis whose answers follow grammars."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from trioengine.core.sampling_params import SamplingParams
from trioengine.testing.fuzz import inside
from trioengine.testing.fuzz.callers import Reader, Style
from trioengine.testing.fuzz.calls_machine import WHICH
from trioengine.testing.fuzz.grammars import GRAMMARS, NAMES
from trioengine.testing.fuzz.program import recorded
from trioengine.testing.fuzz.sessions_machine import SessionsMachine
from trioengine.testing.fuzz.world import ROUNDS

CROWD = ("to be or not to be", "that is the question")  # they share no blocks
MOST_READERS = 2  # beside which a crowd comes
STOPS = ("", "", "", "e", " b", "a)")


class GrammarsMachine(SessionsMachine):
    """The rules of requests with grammars."""

    @precondition(lambda self: self.worker is not None and len(self.worker.compiler) > 0)
    @recorded()
    def compile(self) -> None:
        """One grammar is compiled in the worker, beside a step."""
        self._worker().compile()

    @precondition(lambda self: self.open_holders)
    @recorded(
        which=WHICH,
        grammar=st.sampled_from(NAMES),
        style=st.sampled_from([style.value for style in Style]),
        stop=st.sampled_from(STOPS),
        min_tokens=st.sampled_from((0, 0, 3, 12)),
        max_tokens=st.sampled_from((40, 40, 12)),
        ignore_eos=st.booleans(),
        keep_partial=st.booleans(),
        media=st.sampled_from(("", "", "one", "dot two")),
        rounds=st.sampled_from((0, 0, 6, 12)),
    )
    def ask_by_grammar(
        self,
        which: int,
        grammar: str,
        style: str,
        stop: str,
        min_tokens: int,
        max_tokens: int,
        ignore_eos: bool,
        keep_partial: bool,
        media: str,
        rounds: int,
    ) -> None:
        """A request with a grammar; how far it gets is given."""
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=(stop,) if stop else (),
            ignore_eos=ignore_eos,
            grammar=GRAMMARS[grammar].grammar,
        )
        media = media if self.shows else ""
        self._read(which, Style(style), params, prompt="be", keep_partial=keep_partial, media=media)
        if rounds:
            self._flow(rounds)

    @precondition(lambda self: self.worker is not None and len(self.running_readers) < MOST_READERS)
    @recorded(
        which=st.integers(0, 2), grammar=st.sampled_from(("words", "object")), min_tokens=st.sampled_from((0, 30))
    )
    def crowd_by_grammar(self, which: int, grammar: str, min_tokens: int) -> None:
        """Two requests whose answers together need more KV blocks than there are, so that one is preempted."""
        for _ in range(2 - len(self.idle_holders)):
            self._open(None)
        self.loop.settle()
        if len(self.idle_holders) < 2:  # the engine has no room for two
            return
        for each, prompt in zip((grammar, "words"), CROWD, strict=True):
            params = SamplingParams(max_tokens=40, min_tokens=min_tokens, grammar=GRAMMARS[each].grammar)
            self._read(which, Style.ALL, params, prompt=prompt)
            self._flow_to_the_compiler()
            if not self.open_holders:  # the engine may give up meanwhile
                break
        while self.worker is not None and self.worker.reads and self.worker.compiler:
            self.worker.compile()

    @precondition(lambda self: self.worker is not None and self.idle_holders)
    @recorded(
        which=st.integers(0, 2),
        grammar=st.sampled_from(NAMES),
        what=st.sampled_from(("abort", "cancel", "end")),
    )
    def stop_compiling(self, which: int, grammar: str, what: str) -> None:
        """A request is stopped while its grammar compiles in the worker, and ends before that does."""
        params = SamplingParams(max_tokens=20, grammar=GRAMMARS[grammar].grammar)
        reader = self._read(which, Style.ALL, params, prompt="a")
        self._flow_to_the_compiler()
        generation, worker = reader.generation, self.worker
        if generation is None or worker is None or not reader.entered:
            return
        if not inside.is_compiling(worker, generation.request_id):
            return
        self.coverage.saw(f"{what} while its grammar compiles")
        self._stop_or_end(reader, what)
        self._flow_to_the_compiler()
        self._check_let_go(reader)

    def _flow_to_the_compiler(self) -> None:
        """Everything moves, but the compiler."""
        for _ in range(ROUNDS):
            self.loop.settle()
            if self.worker is None or not self._move(compiles=False):
                return

    def _check_let_go(self, reader: Reader) -> None:
        """All has come to rest but the compiler: the worker has let go of a request that was stopped."""
        worker, generation = self.worker, reader.generation
        if worker is None or generation is None or not self.is_well:
            return
        assert not inside.is_compiling(worker, generation.request_id), f"it was stopped, and compiles: {generation}"
        assert reader.over, f"it was stopped while its grammar compiled, and its reader waits: {reader}"
