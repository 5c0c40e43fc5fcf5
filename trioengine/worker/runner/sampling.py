"""Chooses the next token of every row of a step, all rows together.

Logits are changed first, in vLLM's order: bias, banned stop tokens, penalties. Then top_k, top_p and min_p leave out
the tokens below a threshold, a property of its row alone, however it is found. Of the tokens that tie with it, top_k
and top_p keep those with the lowest ids, so that exactly top_k tokens stay, or the fewest that reach top_p; min_p keeps
all of them.

The number drawn for a token depends on the seed and the token's position alone: the stream of a seed is SplitMix64
(Steele, Lea, Flood 2014) from a hashed start, and the position is its counter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from trioengine.core.grammar import GrammarFailed
from trioengine.core.messages import INVALID_GRAMMAR, NO_TOKEN_LEFT, SAMPLING_FAILED, RequestFailed
from trioengine.core.sampling_params import ResolvedParams
from trioengine.core.types import Logprobs
from trioengine.worker.kernels.best_tokens import Best, best_tokens
from trioengine.worker.scheduling.sequence import Sampled, ScheduledSequence, Sequence
from trioengine.worker.scheduling.speculation import verified

GREEDY_BELOW = 1e-5  # temperatures below are greedy, as in vLLM
NOT_FINITE = "logits are not finite"
NOTHING_LEFT = "the parameters leave no token to choose"

_BUCKET = 256  # tokens
_CANDIDATES = 256  # the nucleus is looked for among that many first; all are sorted only where it is larger
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sample_all(logits: Tensor, scheduled: Iterable[ScheduledSequence], best: Best | None = None) -> list[Sampled]:
    """The result of each entry that samples, from a row of logits [num_rows, vocab_size], float32, for each place.

    `best`: the best tokens of these logits, if they are known.
    """
    entries = [entry for entry in scheduled if entry.samples]
    if not any(entry.draft for entry in entries):
        return sample(logits, [entry.sequence for entry in entries], best)
    rows = iter(sample(logits, [behind for entry in entries for behind in entry.sampled_behind], best))
    return [verified(entry.draft, list(islice(rows, 1 + len(entry.draft)))) for entry in entries]


def sample(logits: Tensor, sequences: list[Sequence], best: Best | None = None) -> list[Sampled]:
    """One token for each row of logits [num_rows, vocab_size], float32; a row without one, or not finite, fails alone.

    A row's token depends on the row, its parameters, its seed and its position, and on nothing else in the batch.
    `best`: the best tokens of these logits, if they are known.
    """
    if not sequences:
        return []
    changed = [row for row, sequence in enumerate(sequences) if changes_logits(sequence)]
    masks, failures = _masks(sequences)
    processed = logits.clone() if changed else logits
    for row in changed:
        process_row(processed[row], sequences[row])
    if masks:
        processed = _allowed(processed, masks)
    raw = best_tokens(logits) if best is None else best
    best = raw if processed is logits else best_tokens(processed)
    token_ids = _draw_all(processed, best, sequences)
    largest: list[float] = best.logits.tolist()
    models_own = largest if processed is logits else raw.logits.tolist()
    checked = [logit if math.isfinite(own) else math.nan for logit, own in zip(largest, models_own, strict=True)]
    rows = _rows(sequences, token_ids.tolist(), checked, _logprobs(logits, token_ids, sequences))
    return [failures.get(row, sampled) for row, sampled in enumerate(rows)]


def _masks(sequences: list[Sequence]) -> tuple[dict[int, bytes], dict[int, RequestFailed]]:
    """The tokens that grammars allow, by row, and the rows whose grammars fail."""
    masks: dict[int, bytes] = {}
    failures: dict[int, RequestFailed] = {}
    for row, sequence in enumerate(sequences):
        if sequence.constraint is not None:
            try:
                masks[row] = sequence.constraint.allowed()
            except GrammarFailed as exc:
                failures[row] = sequence.failure(INVALID_GRAMMAR, f"grammar: {exc}")
    return masks, failures


def _allowed(logits: Tensor, masks: Mapping[int, bytes]) -> Tensor:
    """Return logits without the tokens that these rows' masks forbid: a bit for each token, the first one's lowest.

    The masks are equally long; tokens beyond them are forbidden. One operation of torch for all rows: on cores that are
    shared, each waits for the slower of two threads.
    """
    packed = np.frombuffer(b"".join(masks.values()), dtype=np.uint8).reshape(len(masks), -1)
    allowed = np.unpackbits(packed, axis=1, bitorder="little", count=logits.shape[1]).view(np.bool_)
    if len(masks) < len(logits):
        of_masks, allowed = allowed, np.ones(logits.shape, dtype=np.bool_)
        allowed[list(masks)] = of_masks
    return torch.where(torch.from_numpy(allowed).to(logits.device), logits, float("-inf"))


def _rows(
    sequences: list[Sequence], token_ids: list[int], best: list[float], logprobs: list[Logprobs | None]
) -> list[Sampled]:
    """`best` is the greatest logit of each row: nan is a fault of the model, an infinity of the parameters."""
    rows: list[Sampled] = []
    for sequence, token_id, logit, logprob in zip(sequences, token_ids, best, logprobs, strict=True):
        if math.isfinite(logit):
            rows.append(sequence.row(token_id, logprob))
        else:
            failure = (SAMPLING_FAILED, NOT_FINITE) if math.isnan(logit) else (NO_TOKEN_LEFT, NOTHING_LEFT)
            rows.append(sequence.failure(*failure))
    return rows


def _draw_all(logits: Tensor, best: Best, sequences: list[Sequence]) -> Tensor:
    """The best tokens, or drawn ones in the rows that are not greedy; a row that failed gets any."""
    drawn = [row for row, sequence in enumerate(sequences) if sequence.params.temperature >= GREEDY_BELOW]
    if not drawn:
        return best.token_ids
    rows = torch.tensor(drawn, device=logits.device)
    highest = best.logits[rows, None]
    shifted = logits[rows].sub_(highest).masked_fill_(~highest.isfinite(), 0.0)
    token_ids = best.token_ids.clone()
    token_ids[rows] = _draw(shifted, [sequences[row] for row in drawn])
    return token_ids


def _draw(shifted: Tensor, sequences: list[Sequence]) -> Tensor:
    """Draw from logits [num_rows, vocab_size], whose maxima are 0: token ids, [num_rows]."""
    temperatures = torch.tensor([sequence.params.temperature for sequence in sequences], device=shifted.device)
    scaled = shifted.div_(temperatures[:, None])
    weights = scaled.exp()  # [num_rows, vocab_size]
    filtered = [row for row, sequence in enumerate(sequences) if has_filter(sequence.params, shifted.shape[1])]
    if filtered:
        rows = torch.tensor(filtered, device=shifted.device)
        weights[rows] = filter_rows(scaled[rows], [sequences[row].params for row in filtered])
    draws = [uniform(sequence.params.seed or 0, sequence.num_tokens) for sequence in sequences]
    return _invert(weights, torch.tensor(draws, dtype=torch.float64, device=shifted.device))


def _invert(weights: Tensor, draws: Tensor) -> Tensor:
    """The tokens at the fractions `draws` of the rows' cumulative weights, in the order of the vocabulary.

    Sums of buckets first, then inside the one bucket: a running sum over the whole vocabulary is slow.
    """
    rows = torch.arange(len(weights), device=weights.device)
    buckets = _buckets(weights)
    sums = buckets.sum(dim=-1).double().cumsum(dim=-1)  # [num_rows, num_buckets]
    target = draws * sums[:, -1]
    bucket = _first_above(sums, target)
    before = torch.where(bucket > 0, sums[rows, bucket - 1], 0.0)
    inside = buckets[rows, bucket].double().cumsum(dim=-1)  # [num_rows, _BUCKET]
    return bucket * _BUCKET + _first_above(inside, target - before)


def _buckets(weights: Tensor) -> Tensor:
    """[num_rows, num_buckets, _BUCKET], zero behind the vocabulary."""
    return F.pad(weights, (0, -weights.shape[1] % _BUCKET)).view(len(weights), -1, _BUCKET)


def _totals(weights: Tensor) -> Tensor:
    """The sums of rows [num_rows, vocab_size], in float64: [num_rows].

    In the same order whatever the numbers of rows and of threads: torch divides a long sum of one row among threads.
    """
    return _buckets(weights).sum(dim=-1).double().sum(dim=-1)


def _first_above(sums: Tensor, target: Tensor) -> Tensor:
    """The first place where a row's running sum exceeds its target, which is kept below the last sum."""
    target = torch.minimum(target, sums[:, -1] * (1 - 2.0**-40)).clamp_(min=0.0)
    place = torch.searchsorted(sums, target[:, None], right=True).squeeze(1)
    return place.clamp_(max=sums.shape[1] - 1)  # a place beyond the end would fail every row


def _logprobs(raw: Tensor, ids: Tensor, sequences: list[Sequence]) -> list[Logprobs | None]:
    """Log-probabilities before temperature and everything else: the chosen token first, then the best."""
    result: list[Logprobs | None] = [None] * len(sequences)
    for row, sequence in enumerate(sequences):
        if sequence.params.logprobs is None:
            continue
        (result[row],) = logprobs_of(raw[row : row + 1], ids[row : row + 1], sequence.params.logprobs)
    return result


def logprobs_of(logits: Tensor, chosen: Tensor, top: int) -> list[Logprobs]:
    """Log-probabilities in rows of logits [num_rows, vocab_size]: of `chosen` [num_rows] first, then of the best."""
    highest = logits.amax(dim=-1, keepdim=True)
    totals = highest + _totals((logits - highest).exp()).log().float()[:, None]
    best = logits.topk(min(top, logits.shape[1]))
    chosen_values = (logits.gather(1, chosen[:, None]) - totals).squeeze(1)
    found: list[Logprobs] = []
    for token_id, value, ids, values in zip(
        chosen.tolist(), chosen_values.tolist(), best.indices.tolist(), (best.values - totals).tolist(), strict=True
    ):
        found.append({token_id: value, **{each: v for each, v in zip(ids, values, strict=True) if each != token_id}})
    return found


def changes_logits(sequence: Sequence) -> bool:
    """Whether `process_row` would do anything."""
    params = sequence.params
    return bool(params.logit_bias) or _bans_stops(sequence) or _has_penalties(params)


def process_row(logits: Tensor, sequence: Sequence) -> None:
    """Change one row, [vocab_size] in float32, in place."""
    params, vocab_size = sequence.params, len(logits)
    if params.logit_bias:
        bias = {token_id: value for token_id, value in params.logit_bias.items() if token_id < vocab_size}
        values = torch.tensor(list(bias.values()), dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, torch.tensor(list(bias), dtype=torch.int64, device=logits.device), values)
    if _bans_stops(sequence):
        banned = sequence.eos_token_ids.union(params.stop_token_ids)
        logits[[token_id for token_id in banned if token_id < vocab_size]] = float("-inf")
    if _has_penalties(params):
        _penalize(logits, sequence)


def _bans_stops(sequence: Sequence) -> bool:
    return sequence.num_output_tokens < sequence.params.min_tokens


def _has_penalties(params: ResolvedParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _penalize(logits: Tensor, sequence: Sequence) -> None:
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.unique(torch.tensor(sequence.token_ids, device=logits.device))
        values = logits[seen]
        scale = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / scale, values * scale)
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    if output and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        seen, counts = torch.unique(torch.tensor(output, device=logits.device), return_counts=True)
        logits[seen] -= params.frequency_penalty * counts + params.presence_penalty


def has_filter(params: ResolvedParams, vocab_size: int) -> bool:
    """Whether the parameters leave tokens out at all."""
    return _limits_count(params, vocab_size) or params.top_p < 1.0 or params.min_p > 0.0


def filter_rows(scaled: Tensor, params: list[ResolvedParams]) -> Tensor:
    """Weights of the tokens that stay, 0 for the others: [num_rows, vocab_size].

    `scaled` is [num_rows, vocab_size] in float32: logits over temperature, less their maximum (so the best is 0).
    """
    vocab_size = scaled.shape[1]
    counts = [row.top_k if _limits_count(row, vocab_size) else 0 for row in params]
    candidates = scaled.topk(min(vocab_size, max(_CANDIDATES, *counts))).values  # [num_rows, candidates], descending
    rows = torch.arange(len(params), device=scaled.device)
    last = torch.tensor([max(count, 1) - 1 for count in counts], device=scaled.device)
    limited = torch.tensor([count > 0 for count in counts], device=scaled.device)
    threshold = torch.where(limited, candidates[rows, last], float("-inf"))
    least = [math.log(row.min_p) if row.min_p > 0.0 else float("-inf") for row in params]
    threshold = torch.maximum(threshold, torch.tensor(least, device=scaled.device))
    weights = torch.where(scaled >= threshold[:, None], scaled.exp(), 0.0)
    staying = (scaled >= threshold[:, None]).sum(dim=-1).tolist()
    for row, row_params in enumerate(params):
        if 0 < counts[row] < staying[row]:
            _keep(weights[row], scaled[row], threshold[row], counts[row])
        if row_params.top_p < 1.0:
            mass = row_params.top_p * _totals(weights[row : row + 1])
            if (last_one := _nucleus(scaled[row], candidates[row], threshold[row], mass)) is not None:
                _keep(weights[row], scaled[row], *last_one)
    return weights


def _limits_count(params: ResolvedParams, vocab_size: int) -> bool:
    return 0 < params.top_k < vocab_size


def _keep(weights: Tensor, scaled: Tensor, smallest: Tensor, count: int) -> None:
    """Take out all but the `count` best tokens of a row, of which `smallest` is the last one's value."""
    weights.masked_fill_(scaled < smallest, 0.0)
    tied = (scaled == smallest).nonzero().squeeze(1)  # in the order of their ids
    weights[tied[count - int((scaled > smallest).sum()) :]] = 0.0


def _nucleus(scaled: Tensor, candidates: Tensor, threshold: Tensor, mass: Tensor) -> tuple[Tensor, int] | None:
    """The smallest value of the fewest best tokens that weigh `mass` together, and their number; None: all stay."""
    for values in (candidates, scaled):
        ordered = values if values is candidates else values.sort(descending=True).values
        weights = torch.where(ordered >= threshold, ordered.exp(), 0.0)
        reached = weights.double().cumsum(0) >= mass
        if reached[-1]:
            index = int(reached.byte().argmax())
            return ordered[index], index + 1
    return None  # the sums differ in their last digits


def uniform(seed: int, position: int) -> float:
    """A number from [0, 1), in steps of 2**-53."""
    start = _mix((seed & _MASK) ^ _GOLDEN)
    return (_mix((start + position * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
