"""What changes logits before a token is chosen: bias, banned stop tokens, penalties. In vLLM's order."""

from __future__ import annotations

import torch
from torch import Tensor

from trioengine.core.sampling_params import SamplingParams
from trioengine.worker.scheduling.sequence import Sequence


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


def _has_penalties(params: SamplingParams) -> bool:
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
