"""The sampler: every parameter, alone and in a batch."""

import itertools
import math
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode

from trioengine.core.grammar import GrammarFailed
from trioengine.core.messages import RequestFailed, TokensRow
from trioengine.core.sampling_params import ResolvedParams
from trioengine.worker.kernels.best_tokens import best_tokens
from trioengine.worker.runner import sampling
from trioengine.worker.runner.sampling import _first_above, process_row, sample_all, uniform
from trioengine.worker.scheduling.sequence import ScheduledSequence, Sequence

VOCAB = 300  # more than a bucket, and no multiple of one
EOS = 7
_DEVICE = "cpu"


@pytest.fixture(autouse=True)
def device_of_logits(device, monkeypatch):
    monkeypatch.setitem(globals(), "_DEVICE", device)


def sample(logits, sequences):
    """The sampler's rows for logits on the device."""
    return sampling.sample(logits.to(_DEVICE), sequences)


def sequence(prompt=(1, 2), output=(), request=0, **params):
    params = {"seed": 0, "temperature": 0.0, **params}
    return Sequence(request, request, [*prompt, *output], len(prompt), ResolvedParams(**params), frozenset({EOS}))


def logits(*rows):
    """Rows of {token: logit}; every other logit is 0."""
    result = torch.zeros(len(rows), VOCAB)
    for row, values in enumerate(rows):
        for token, value in values.items():
            result[row, token] = value
    return result


def chosen(row, **params):
    (token,) = sample(logits(row), [sequence(**params)])
    assert isinstance(token, TokensRow)
    return token.token_ids[0]


def errors(rows):
    return [row.message if isinstance(row, RequestFailed) else None for row in rows]


def drawn(row, draws=400, **params):
    """How often each token is drawn, over as many seeds."""
    sequences = [sequence(seed=seed, **{"temperature": 1.0, **params}) for seed in range(draws)]
    return Counter(token.token_ids[0] for token in sample(logits(row).expand(draws, -1), sequences))


def peaked(*probabilities):
    """Logits of tokens 10, 11, … with these probabilities; the other tokens together have next to nothing."""
    return dict.fromkeys(range(VOCAB), -100.0) | {
        10 + index: math.log(probability) for index, probability in enumerate(probabilities)
    }


@pytest.mark.parametrize("draft", [(), (3, 4)])
def test_known_best_tokens_are_not_looked_for(draft, monkeypatch):
    """Nor changed, where tokens are drawn."""
    entries = [ScheduledSequence(sequence(request=1), 2 + len(draft), draft), ScheduledSequence(sequence(), 2)]
    places = logits(*({each: 9.0} for each in (3, 4, 5, 6)[-2 - len(draft) :])).to(_DEVICE)
    best = best_tokens(places)
    before = best.token_ids.tolist()
    expected = sample_all(places, entries)
    monkeypatch.delattr(sampling, "best_tokens")
    assert sample_all(places, entries, best) == expected
    assert best.token_ids.tolist() == before


def test_drafts_of_several_sequences():
    """Each keeps its own tokens: all of its draft, a part, nothing; a row behind a difference is left out."""
    entries = [
        ScheduledSequence(sequence(request=request), 2 + len(draft), draft)
        for request, draft in enumerate([(3, 4), (5, 6), (), (7,)])
    ]
    best = [3, 4, 9, 5, 1, 2, 8, 6, 0]  # of each place
    rows = sample_all(logits(*({each: 1.0} for each in best)).to(_DEVICE), entries)
    assert [(row.request, row.token_ids.tolist()) for row in rows] == [(0, [3, 4, 9]), (1, [5, 1]), (2, [8]), (3, [6])]


def test_penalties_count_the_tokens_of_a_draft():
    """As if they were the answer: the second 3 is no longer the best token."""
    penalized = sequence(temperature=0.0, presence_penalty=2.0)
    places = logits(*[{2: 1.0, 3: 2.5}] * 3).to(_DEVICE)
    (row,) = sample_all(places, [ScheduledSequence(penalized, 4, (3, 3))])
    assert row.token_ids.tolist() == [3, 2]


def test_greedy():
    assert chosen({5: 1.0, 299: 2.0}) == 299
    assert chosen({5: 1.0, 299: 2.0}, temperature=1e-6) == 299


def test_temperature_spreads():
    row = peaked(0.7, 0.2, 0.1)
    assert set(drawn(row)) == {10, 11, 12}
    assert drawn(row)[10] == pytest.approx(280, abs=40)
    assert set(drawn(row, temperature=0.05)) == {10}
    hot = drawn(row, temperature=3.0)
    assert hot[12] > drawn(row)[12]


def test_the_same_seed_and_position_draw_the_same():
    row = dict.fromkeys(range(VOCAB), 0.0)
    again = [chosen(row, temperature=1.0, seed=5) for _ in range(3)]
    assert len(set(again)) == 1
    assert len({chosen(row, temperature=1.0, seed=5, output=[1] * length) for length in range(20)}) > 10
    assert len({chosen(row, temperature=1.0, seed=seed) for seed in range(-10, 10)}) > 10


def test_uniform_is_uniform():
    draws = [uniform(seed, position) for seed in (-(2**63), -1, 0, 1, 2**63 - 1) for position in range(4000)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    counts = Counter(int(draw * 10) for draw in draws)
    assert all(abs(counts[digit] - 2000) < 200 for digit in range(10))


def test_alone_and_in_a_batch():
    """Rows of every kind, in any company: the same tokens."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 1.3, "top_p": 0.999999},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 290, "top_p": 0.5, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 0.9, "frequency_penalty": 1.0, "logit_bias": {4: 3.0}, "min_tokens": 5, "logprobs": 2},
    ] * 5
    sequences = [
        sequence(request=index, output=[3, 3, 4], seed=index * 17, **params) for index, params in enumerate(kinds)
    ]
    rows = torch.randn(len(kinds), VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    before = rows.clone()
    together = sample(rows, sequences)
    alone = [sample(rows[index : index + 1], [one])[0] for index, one in enumerate(sequences)]
    assert together == alone
    order = list(reversed(range(len(kinds))))
    assert sample(rows[order], [sequences[index] for index in order]) == [alone[index] for index in order]
    assert torch.equal(rows, before)


def test_top_k():
    row = peaked(0.4, 0.3, 0.2, 0.1)
    assert set(drawn(row, top_k=2)) == {10, 11}
    assert set(drawn(row, top_k=1)) == {10}
    assert set(drawn(row, top_k=-1)) == {10, 11, 12, 13}


@pytest.mark.parametrize("top_k", [1, 3, 5, 299])
def test_top_k_keeps_as_many_among_ties(top_k):
    """Those with the lowest ids: 20 is best, all others tie."""
    assert set(drawn({20: 0.1}, draws=3000, top_k=top_k)) <= {20, *range(top_k if top_k > 20 else top_k - 1)}
    assert len(set(drawn({20: 0.1}, draws=3000, top_k=min(top_k, 5)))) == min(top_k, 5)


def test_ties_within_top_k_stay():
    row = {token: math.log(token % 3 + 1) for token in range(VOCAB)}
    assert all(token % 3 == 2 for token in drawn(row, draws=2000, top_k=100))
    assert max(drawn(row, draws=2000, top_k=100)) > 250
    assert max(token for token in drawn(row, draws=2000, top_k=101) if token % 3 == 1) == 1


def test_top_p_takes_the_fewest_among_ties():
    row = dict.fromkeys(range(VOCAB), -math.inf) | dict.fromkeys((9, 50, 51, 200), 0.0)
    assert set(drawn(row, top_p=0.4)) == {9, 50}
    assert set(drawn(row, top_p=0.6)) == {9, 50, 51}
    assert set(drawn(row, top_p=0.6, top_k=2)) == {9, 50}
    assert set(drawn(row, top_p=0.4, top_k=2)) == {9}
    wide = dict.fromkeys(range(VOCAB), 0.0)
    assert max(drawn(wide, draws=4000, top_p=0.9)) == 269


def test_min_p_keeps_ties():
    assert set(drawn(peaked(0.4, 0.2, 0.2, 0.2), min_p=0.49)) == {10, 11, 12, 13}
    assert set(drawn(peaked(0.4, 0.2, 0.2, 0.2), min_p=0.49, top_k=3)) == {10, 11, 12}


def test_top_p():
    row = peaked(0.4, 0.3, 0.2, 0.1)
    assert set(drawn(row, top_p=0)) == {10}
    assert set(drawn(row, top_p=0.39)) == {10}
    assert set(drawn(row, top_p=0.69)) == {10, 11}
    assert set(drawn(row, top_p=0.71)) == {10, 11, 12}
    assert set(drawn(row, top_k=2, top_p=0.56)) == {10}  # 0.4 of 0.7: top_p looks at what top_k left
    assert set(drawn(row, top_k=2, top_p=0.58)) == {10, 11}


def test_a_nucleus_larger_than_the_first_candidates():
    """Nearly uniform over 300 tokens: 0.95 of the mass are 285 of them."""
    row = {token: -0.001 * token for token in range(VOCAB)}
    seen = drawn(row, draws=4000, top_p=0.95)
    assert 260 < max(seen) < 290


def test_min_p():
    row = peaked(0.4, 0.3, 0.2, 0.1)
    assert set(drawn(row, min_p=0.6)) == {10, 11}
    assert set(drawn(row, min_p=1.0)) == {10}


def test_repetition_penalty_covers_prompt_and_output():
    row = {5: 2.0, 6: 1.9, 8: 1.5}
    assert chosen(row, repetition_penalty=1.2) == 5
    assert chosen(row, prompt=[5], repetition_penalty=1.2) == 6
    assert chosen(row, prompt=[5], output=[6], repetition_penalty=1.5) == 8
    negative = dict.fromkeys(range(VOCAB), -5.0) | {5: -1.0, 6: -1.1}
    assert chosen(negative, prompt=[5], repetition_penalty=1.2) == 6


def test_presence_and_frequency_penalties_cover_the_output_only():
    row = {5: 2.0, 6: 1.2}
    assert chosen(row, prompt=[5], presence_penalty=1.0, frequency_penalty=1.0) == 5
    assert chosen(row, output=[5], presence_penalty=1.0) == 6
    assert chosen(row, output=[5], frequency_penalty=0.5) == 5
    assert chosen(row, output=[5, 5], frequency_penalty=0.5) == 6


def test_logit_bias():
    assert chosen({5: 2.0}, logit_bias={9: 3.0}) == 9
    assert chosen({5: 2.0, 6: 1.0}, logit_bias={5: -100.0}) == 6
    assert chosen({5: 2.0}, logit_bias={VOCAB + 5: 100.0}) == 5  # no such token
    assert chosen({5: 2.0}, logit_bias={VOCAB + 5: 100.0, 9: 3.0}) == 9


class Operations(TorchFunctionMode):
    """Counts what torch is asked to do."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_long_logit_bias_takes_no_more_operations():
    counts = []
    for length in (1, 200):
        with Operations() as operations:
            process_row(torch.zeros(VOCAB), sequence(logit_bias=dict.fromkeys(range(length), 1.0)))
        counts.append(operations.count)
    assert counts[0] == counts[1] < 10


def test_min_tokens_bans_every_stop_token():
    row = {EOS: 5.0, 8: 4.0, 9: 3.0}
    assert chosen(row, min_tokens=2, stop_token_ids=(8, VOCAB + 1)) == 9
    assert chosen(row, min_tokens=2, output=[1], stop_token_ids=(8,)) == 9
    assert chosen(row, min_tokens=2, output=[1, 1], stop_token_ids=(8,)) == EOS


def test_logprobs_are_of_the_raw_logits():
    """Before temperature, bias and penalties; the chosen token first, even where it is not among the best."""
    row = peaked(0.5, 0.3, 0.2)
    (token,) = sample(logits(row), [sequence(logprobs=2, logit_bias={12: 50.0}, temperature=0.5)])
    assert token.token_ids[0] == 12
    assert list(token.logprobs[0]) == [12, 10, 11]
    assert list(token.logprobs[0].values()) == pytest.approx([math.log(0.2), math.log(0.5), math.log(0.3)], abs=1e-5)
    (token,) = sample(logits(row), [sequence(logprobs=0)])
    assert list(token.logprobs[0]) == [10]
    (token,) = sample(logits(row), [sequence(logprobs=2)])
    assert list(token.logprobs[0]) == [10, 11]


@pytest.mark.parametrize("bias", [{}, {3: 1.0}])
def test_a_row_of_nothing_but_infinities_is_not_the_parameters_fault(bias):
    """As where a model's own mask leaves nothing."""
    rows = torch.full((1, VOCAB), -math.inf)
    for params in ({}, {"temperature": 1.0}):
        (token,) = sample(rows.clone(), [sequence(logit_bias=bias, **params)])
        assert (token.message, token.code) == ("logits are not finite", "sampling_failed")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 1, "presence_penalty": 1.0}])
def test_rows_that_are_not_finite_fail_alone(bad, params):
    rows = logits({5: 50.0}, {5: 50.0, 6: bad}, {8: 50.0})
    tokens = sample(rows, [sequence(request=request, **params) for request in range(3)])
    assert errors(tokens) == [None, "logits are not finite", None]
    assert tokens[1].code == "sampling_failed"
    assert [token.request for token in tokens] == [0, 1, 2]
    assert (tokens[0].token_ids[0], tokens[2].token_ids[0]) == (5, 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}, {"logprobs": 3}])
def test_rows_that_overflow_or_have_every_token_banned_fail_alone(temperature, filters):
    params = {"temperature": temperature, **filters}
    rows = logits({5: 50.0}, {5: 3e38}, dict.fromkeys(range(VOCAB), -3e38), {5: 50.0}, {8: 50.0})
    tokens = sample(
        rows,
        [
            sequence(request=0, **params),
            sequence(request=1, prompt=[5], repetition_penalty=0.01, **params),
            sequence(request=2, prompt=list(range(VOCAB)), repetition_penalty=100.0, **params),
            sequence(request=3, min_tokens=1, stop_token_ids=tuple(range(VOCAB)), **params),
            sequence(request=4, **params),
        ],
    )
    no_token = "the parameters leave no token to choose"
    assert errors(tokens) == [None, no_token, no_token, no_token, None]
    assert {token.code for token in tokens if isinstance(token, RequestFailed)} == {"no_token_left"}
    assert [token.request for token in tokens] == list(range(5))
    assert (tokens[0].token_ids[0], tokens[4].token_ids[0]) == (5, 8)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_parameters_at_their_bounds_overflow_nothing(scale):
    kinds = itertools.product([1e-5, 100], [0.01, 100], [-2, 2], [5e-324, 1], [0, 5e-324, 1], [-1, 1, 2**31 - 1])
    sequences = [
        sequence(
            prompt=range(0, VOCAB, 2),
            output=[3] * 1000,
            request=request,
            temperature=temperature,
            repetition_penalty=repetition,
            presence_penalty=penalty,
            frequency_penalty=penalty,
            logit_bias={3: 50 * penalty, 4: -50 * penalty},
            top_p=top_p,
            min_p=min_p,
            top_k=top_k,
            min_tokens=2**31 - 1,
        )
        for request, (temperature, repetition, penalty, top_p, min_p, top_k) in enumerate(kinds)
    ]
    rows = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(2)) * scale
    tokens = sample(rows, sequences)
    assert errors(tokens) == [None] * len(sequences)
    assert all(0 <= token.token_ids[0] < VOCAB and token.token_ids[0] != EOS for token in tokens)


@pytest.mark.parametrize("place", [math.nan, 2.0])
def test_a_running_sum_that_means_nothing_gives_a_place_within_it(place):
    sums = torch.tensor([[0.0, 0.0], [math.nan, math.nan], [0.5, 1.0]], dtype=torch.float64)
    assert all(0 <= found < 2 for found in _first_above(sums, torch.full((3,), place, dtype=torch.float64)).tolist())


def test_nothing_to_sample():
    assert sample(torch.empty(0, VOCAB), []) == []


class Allows:
    """A constraint that allows these tokens; none: its grammar has failed."""

    is_complete = False

    def __init__(self, *tokens):
        self._tokens = tokens

    def advance(self, output):
        pass

    def allowed(self):
        if not self._tokens:
            raise GrammarFailed("it is too complex")
        mask = bytearray(36)  # of 288 tokens; those beyond are forbidden
        for token in self._tokens:
            mask[token // 8] |= 1 << token % 8
        return bytes(mask)


def constrained(constraint, **params):
    made = sequence(**params)
    made.constraint = constraint
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("free", [0, 2])
def test_grammars_allow_tokens_of_their_rows_alone(temperature, free):
    sequences = [constrained(Allows(4), temperature=temperature), constrained(Allows(9, 287), temperature=temperature)]
    sequences += [sequence(temperature=0.0)] * free
    rows = logits(*[{5: 1.0, 287: 9.0, 299: 50.0}] * len(sequences))
    before = rows.clone()
    assert [row.token_ids[0] for row in sample(rows, sequences)] == [4, 287, 299, 299][: len(sequences)]
    assert torch.equal(rows, before)


def test_a_grammar_allows_after_everything_else():
    """Bias cannot bring back a token, and log-probabilities are of the raw logits."""
    (token,) = sample(logits({5: 1.0}), [constrained(Allows(4), logit_bias={9: 100.0}, min_tokens=3, logprobs=1)])
    assert list(token.logprobs[0]) == [4, 5]
    (none,) = sample(logits({5: 1.0}), [constrained(Allows(EOS), min_tokens=3)])
    assert none.code == "no_token_left"


def test_a_grammar_that_fails_ends_its_request_alone():
    sequences = [sequence(request=1), constrained(Allows(), request=2), constrained(Allows(6), request=3)]
    first, second, third = sample(logits({5: 1.0}, {5: 1.0}, {5: 1.0}), sequences)
    assert (first.token_ids[0], third.token_ids[0]) == (5, 6)
    assert (second.request, second.code, second.message) == (2, "invalid_grammar", "grammar: it is too complex")
    (alone,) = sample(logits({5: 1.0}), [constrained(Allows(), request=2)])
    assert alone == second
