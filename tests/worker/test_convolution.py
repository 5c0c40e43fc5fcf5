"""Convolutions, and the states that they leave, against a formula in float64."""

import pytest
import torch
from helpers import tiny_decoders
from helpers.tiny_llama import PROMPT
from helpers.torch_driver import load

from trioengine.core.errors import InvariantError
from trioengine.core.sampling_params import ResolvedParams
from trioengine.hub.model_config import StatePart
from trioengine.worker.kernels import Convolution
from trioengine.worker.kernels.batch import StateRows
from trioengine.worker.kernels.state_cache import StateCache
from trioengine.worker.scheduling.sequence import ScheduledSequence, SchedulerOutput, Sequence
from trioengine.worker.scheduling.state_slots import PADDING_SLOT, StateCopy

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LENGTHS = [[1], [1, 1, 1, 1], [7], [2, 1, 40, 3], [1, 1, 90, 1]]
SIZES = [(48, 3), (33, 2), (7, 5), (96, 9)]  # columns, taps
NUM_SLOTS = 12
pytestmark = pytest.mark.usefixtures("inference")


class Step:
    """Sequences of these lengths, each with a state; half of the longer ones save one on the way."""

    def __init__(self, lengths, size, taps, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.lengths = lengths
        self.inputs = random(sum(lengths), 3 * size).to(dtype)
        self.convolution = Convolution(random(taps, size), random(size) if size % 2 else None)
        self.states = random(NUM_SLOTS, taps - 1, size).to(dtype)
        self.slots = torch.randperm(NUM_SLOTS - 1, generator=generator)[: len(lengths)] + 1
        free = [slot for slot in range(1, NUM_SLOTS) if slot not in self.slots.tolist()]
        self.saves = [(index, 1 + new // 2, free.pop()) for index, new in enumerate(lengths) if new > 1]
        first_rows = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.rows = StateRows(
            self.slots,
            torch.tensor(first_rows),
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            torch.tensor(self.saves, dtype=torch.int64).view(-1, 3),
        )

    def expected(self):
        """The results, and the states behind the step."""
        taps, states = len(self.convolution.weight), self.states.clone()
        results = []
        for index, inputs in enumerate(self.inputs.split(self.lengths)):
            b, c, x = inputs.chunk(3, dim=1)
            known = torch.cat([self.states[self.slots[index]], b * x])
            windows = known.double().unfold(0, taps, 1)  # [tokens, size, taps]
            sums = torch.einsum("tsk,ks->ts", windows, self.convolution.weight.double())
            results.append((sums + (0 if self.convolution.bias is None else self.convolution.bias)) * c.double())
            states[self.slots[index]] = known[len(known) - taps + 1 :]
            for _, tokens, slot in (save for save in self.saves if save[0] == index):
                states[slot] = known[tokens : tokens + taps - 1]
        return torch.cat(results), states

    def run(self, kernels):
        """The results; the states are changed."""
        return kernels.convolve(self.inputs, self.convolution, self.states, self.rows)


@pytest.mark.parametrize(("size", "taps"), SIZES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_results_and_states(kernels, dtype, lengths, size, taps):
    step = Step(lengths, size, taps, dtype)
    results, states = step.expected()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(step.run(kernels).double(), results, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(step.states, states, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_pieces_have_the_same_bits(kernels, dtype, threads):
    """One token at a time, with other sequences beside it, and on any number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = Step([5, 23, 9], 48, 4, dtype)
        pieces = step.states.clone()
        whole = step.run(kernels)
        for index, inputs in enumerate(step.inputs.split(step.lengths)):
            slots = step.slots[index : index + 1]
            rows = StateRows(slots, torch.tensor([0, 1]), torch.tensor([0]), torch.zeros((0, 3), dtype=torch.int64))
            first = int(step.rows.first_rows[index])
            for offset, token in enumerate(inputs.split(1)):
                assert torch.equal(
                    kernels.convolve(token.contiguous(), step.convolution, pieces, rows)[0], whole[first + offset]
                )
            assert torch.equal(pieces[slots], step.states[slots])
    finally:
        torch.set_num_threads(before)


def test_what_is_not_finite_stays_in_its_sequence(kernels, dtype):
    step = Step([4, 1, 30], 48, 3, dtype)
    clean = Step([4, 1, 30], 48, 3, dtype)
    step.inputs[4] = torch.nan
    others = [*range(4), *range(5, 35)]
    assert torch.equal(step.run(kernels)[others], clean.run(kernels)[others])
    spoiled = step.states.isnan().flatten(1).any(1).nonzero().flatten().tolist()
    assert spoiled == [int(step.slots[1])]


def test_slots_that_have_no_sequence_are_not_read(kernels, dtype):
    step, clean = (Step([4, 1, 30], 48, 3, dtype) for _ in range(2))
    unread = [slot for slot in range(NUM_SLOTS) if slot not in step.slots.tolist()]
    step.states[unread] = torch.nan
    assert torch.equal(step.run(kernels), clean.run(kernels))


def test_rows_of_padding_reach_no_other_slot(kernels, dtype):
    """As in a captured graph: sequences of one token, all with the slot of padding, whose numbers are not finite."""
    step, padded = (Step([4, 1, 30, 1, 1, 1], 48, 3, dtype) for _ in range(2))
    padded.inputs[35:] = torch.nan
    padded.states[PADDING_SLOT] = torch.inf
    padded.slots[3:] = PADDING_SLOT
    padded_results, results = padded.run(kernels), step.run(kernels)
    assert torch.equal(padded_results[:35], results[:35])
    others = [slot for slot in range(1, NUM_SLOTS) if slot not in step.slots[3:].tolist()]
    assert torch.equal(padded.states[others], step.states[others])


def test_a_slot_is_cleared_or_gets_a_state_before_a_step(dtype):
    cache = StateCache([StatePart((2, 5)), StatePart((3, 4), is_float32=True)], 6, dtype, torch.device("cpu"))
    assert [part.dtype for part in cache.parts] == [dtype, torch.float32]
    for part in cache.parts:
        part.copy_(torch.arange(6).view(6, 1, 1).expand(part.shape))
    cache.parts[0][0] = torch.nan  # of padding
    cache.copy([StateCopy(3, 1), StateCopy(PADDING_SLOT, 3), StateCopy(5, 2), StateCopy(2, 5), StateCopy(4, 4)])
    for part in cache.parts:
        assert [int(slot[0, 0]) for slot in part[1:]] == [3, 5, 0, 4, 2]


def test_a_step_without_slots_is_refused(tmp_path, options):
    runner = load(tiny_decoders.write(tmp_path, "lfm2"), kv_cache_memory=8 << 20, **options)
    sequence = Sequence(0, 0, list(PROMPT), 90, ResolvedParams(seed=0), frozenset(), block_table=[1, 2, 3, 4, 5, 6])
    with pytest.raises(InvariantError, match="no slots"):
        runner.execute(SchedulerOutput((ScheduledSequence(sequence, 90),)))
