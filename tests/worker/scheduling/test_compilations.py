"""Sequences with grammars in the engine core: others step on while one is compiled, and a grammar may fail later."""

from __future__ import annotations

from trioengine import Grammar
from trioengine.core.messages import AddMessage, AddSession, FromWorker, RequestFailed, Tokens
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import token_ids
from trioengine.testing.toy_grammar import toy_compile
from trioengine.testing.toy_model import IM_END, VOCAB_SIZE
from trioengine.testing.toy_runner import ToyRunner
from trioengine.worker.scheduling.engine_core import EngineCore
from trioengine.worker.scheduling.grammars import GrammarCompiled, compile_for
from trioengine.worker.scheduling.sequence import Limits, Sequence

LIMITS = Limits(vocab_size=VOCAB_SIZE, max_model_len=64, kv_blocks_total=32, block_size=4)
ENDLESS = Grammar.json_schema({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})


class LaterCompiler:
    """Compiles when it is asked to, as a busy thread would."""

    def __init__(self) -> None:
        self._submitted: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        self._submitted.append(sequence)

    def compile_next(self) -> GrammarCompiled:
        return compile_for(self._submitted.pop(0), toy_compile)


def begin(core: EngineCore, number: int, grammar: Grammar | None) -> None:
    params = ResolvedParams(max_tokens=20, seed=1, ignore_eos=True, grammar=grammar)
    core.handle(AddSession(number))
    core.handle(AddMessage(number, number, 0, token_ids([1, 2, number]), params, (IM_END,)))


def run(core: EngineCore) -> list[FromWorker]:
    replies: list[FromWorker] = []
    while core.has_work:
        replies += core.step()
        core.check_integrity()
    return replies


def tokens_of(replies: list[FromWorker], request: int) -> bytes:
    rows = [row for reply in replies if isinstance(reply, Tokens) for row in reply.rows if row.request == request]
    return bytes(token for row in rows for token in row.token_ids if token < 256)


def test_others_step_on_while_a_grammar_is_compiled() -> None:
    compiler = LaterCompiler()
    core = EngineCore(ToyRunner(LIMITS), LIMITS, lambda: 0.0, compiler=compiler)
    begin(core, 1, Grammar.choice(["yes"]))
    begin(core, 2, None)
    replies = run(core)
    assert tokens_of(replies, 1) == b"" and tokens_of(replies, 2)
    assert core.requests == (1,)
    core.handle(compiler.compile_next())
    assert tokens_of(run(core), 1) == b"yes"
    assert core.requests == ()


def test_a_grammar_that_fails_between_two_tokens_ends_its_request_alone() -> None:
    compiler = LaterCompiler()
    core = EngineCore(ToyRunner(LIMITS), LIMITS, lambda: 0.0, compiler=compiler)
    for number, grammar in ((1, ENDLESS), (2, Grammar.regex("[a-z]{20}")), (3, None)):
        begin(core, number, grammar)
    for _ in range(2):
        core.handle(compiler.compile_next())
    replies = run(core)
    (failed,) = [reply for reply in replies if isinstance(reply, RequestFailed)]
    assert (failed.request, failed.code) == (1, "invalid_grammar")
    assert failed.message.startswith("grammar: it is too complex")
    assert len(tokens_of(replies, 2)) == 20
    assert core.requests == () and core.sessions == {1, 2, 3}
