"""Gated delta nets, and the states that they leave, against a formula in float64."""

import pytest
import torch
from helpers import tiny_decoders
from helpers.torch_driver import load, needs_compiler
from torch.nn.functional import silu, softplus

from trioengine.core.errors import InvariantError
from trioengine.worker.kernels import GatedDelta, RMSNorm
from trioengine.worker.kernels.batch import StateRows
from trioengine.worker.kernels.native_kernels import NativeKernels

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
LENGTHS = [[1], [1, 1, 1, 1], [7], [2, 1, 40, 3], [1, 1, 90, 1]]
# Heads of keys and of values, their sizes, and taps: the registers of a row of the matrix are none, one or several.
SHAPES = [(2, 4, 12, 8, 4), (3, 3, 16, 36, 2), (1, 6, 10, 33, 5), (2, 2, 24, 160, 4), (1, 2, 7, 3, 3)]
NUM_SLOTS = 12
pytestmark = pytest.mark.usefixtures("inference")


def native(dtype, at_most=None):
    needs_compiler()
    return NativeKernels(4, 2, 16, dtype, 16, at_most)


class Step:
    """Sequences of these lengths, each with a state; the longer ones save one or two on the way."""

    def __init__(self, lengths, shape, dtype, seed=0):
        key_heads, heads, key_dim, value_dim, taps = shape
        generator = torch.Generator().manual_seed(seed)

        def random(*size):
            return torch.randn(size, generator=generator)

        columns = 2 * key_heads * key_dim + heads * value_dim
        self.lengths, self.shape = lengths, shape
        self.inputs = random(sum(lengths), columns + heads * value_dim + 2 * heads).to(dtype)
        norm = RMSNorm(1 + random(value_dim), 1e-5)
        self.delta = GatedDelta(random(taps, columns), random(heads).exp(), random(heads), norm, key_heads, key_dim)
        self.kept = random(NUM_SLOTS, taps - 1, columns).to(dtype)
        self.matrices = random(NUM_SLOTS, heads, key_dim, value_dim)
        self.slots = torch.randperm(NUM_SLOTS - 1, generator=generator)[: len(lengths)] + 1
        free = [slot for slot in range(1, NUM_SLOTS) if slot not in self.slots.tolist()]
        places = [
            (index, num) for index, new in enumerate(lengths) for num in {new // 3, 1 + new // 2} if 0 < num < new
        ]
        self.saves = [(index, num, free.pop()) for index, num in places]
        first_rows = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        self.rows = StateRows(
            self.slots,
            torch.tensor(first_rows),
            torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            torch.tensor(self.saves, dtype=torch.int64).view(-1, 3),
        )

    def expected(self):
        """The results, and the states behind the step."""
        kept, matrices, results = self.kept.clone(), self.matrices.double(), []
        for index, inputs in enumerate(self.inputs.split(self.lengths)):
            slot = int(self.slots[index])
            known = torch.cat([self.kept[slot], inputs[:, : self.kept.shape[2]]])
            sequence, behind = self.recurrence(known.double(), inputs.double(), matrices[slot].clone())
            results.append(sequence)
            saves = [(num, to) for saved, num, to in self.saves if saved == index]
            for num, to in (*saves, (len(inputs), slot)):
                kept[to], matrices[to] = known[num : num + self.kept.shape[1]], behind[num - 1]
        return torch.cat(results), kept, matrices

    def recurrence(self, known, inputs, matrix):
        """The results of a sequence, and its matrices behind each token: S k is the matrix's value for a key."""
        key_heads, heads, key_dim, value_dim, taps = self.shape
        windows = silu(torch.einsum("tsk,ks->ts", known.unfold(0, taps, 1), self.delta.taps.double()))
        keys, values = key_heads * key_dim, heads * value_dim
        q, k, v = windows.split([keys, keys, values], 1)
        _, z, b, a = inputs.split([2 * keys + values, values, heads, heads], 1)
        results, behind = [], []
        for t in range(len(inputs)):
            for head in range(heads):
                shared = slice(head // (heads // key_heads) * key_dim, (head // (heads // key_heads) + 1) * key_dim)
                own = slice(head * value_dim, (head + 1) * value_dim)
                query, key = (x / (x.square().sum() + 1e-6).sqrt() for x in (q[t, shared], k[t, shared]))
                time = softplus(a[t, head] + self.delta.time_bias[head].double())
                matrix[head] *= (-self.delta.rates[head].double() * time).exp()
                correction = torch.sigmoid(b[t, head]) * (v[t, own] - key @ matrix[head])
                matrix[head] += torch.outer(key, correction)
                result = query @ matrix[head] / key_dim**0.5
                normed = result / (result.square().mean() + self.delta.norm.epsilon).sqrt()
                results.append(normed * self.delta.norm.weight.double() * silu(z[t, own]))
            behind.append(matrix.clone())
        return torch.cat(results).view(len(inputs), values), behind

    def run(self, kernels):
        """The results; the states are changed."""
        return kernels.update_delta(self.inputs, self.delta, self.kept, self.matrices, self.rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_results_and_states(kernels, dtype, lengths, shape):
    step = Step(lengths, shape, dtype)
    results, kept, matrices = step.expected()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(step.run(kernels).double(), results, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(step.kept, kept, rtol=0, atol=0)
    torch.testing.assert_close(step.matrices.double(), matrices, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("at_most", [None, "AVX2", "0"])
def test_pieces_have_the_same_bits(at_most, dtype, threads):
    """One token at a time, with other sequences beside it, and on any number of threads."""
    kernels = native(dtype, at_most)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = Step([5, 23, 9], (2, 4, 24, 37, 4), dtype)
        kept, matrices = step.kept.clone(), step.matrices.clone()
        whole = step.run(kernels)
        torch.set_num_threads(1)
        for index, inputs in enumerate(step.inputs.split(step.lengths)):
            slots = step.slots[index : index + 1]
            rows = StateRows(slots, torch.tensor([0, 1]), torch.tensor([0]), torch.zeros((0, 3), dtype=torch.int64))
            first = int(step.rows.first_rows[index])
            saved = {num: slot for sequence, num, slot in step.saves if sequence == index}
            for offset, token in enumerate(inputs.split(1)):
                result = kernels.update_delta(token.contiguous(), step.delta, kept, matrices, rows)
                assert torch.equal(result[0], whole[first + offset])
                if offset + 1 in saved:
                    assert torch.equal(matrices[slots[0]], step.matrices[saved[offset + 1]])
            assert torch.equal(kept[slots], step.kept[slots])
            assert torch.equal(matrices[slots], step.matrices[slots])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("place", ["first", "gate", "last"])
def test_what_is_not_finite_stays_in_its_sequence(kernels, dtype, place):
    step, clean = (Step([4, 1, 30], (2, 4, 12, 20, 3), dtype) for _ in range(2))
    step.inputs[4, {"first": 0, "gate": 2 * 24 + 80, "last": -1}[place]] = torch.nan
    others = [*range(4), *range(5, 35)]
    results = step.run(kernels)
    assert results[4].isnan().any()
    assert torch.equal(results[others], clean.run(kernels)[others])
    spoiled = (step.matrices.isnan().flatten(1).any(1) | step.kept.isnan().flatten(1).any(1)).nonzero().flatten()
    assert set(spoiled.tolist()) == (set() if place == "gate" else {int(step.slots[1])})


def test_slots_that_have_no_sequence_are_not_read(kernels, dtype):
    step, clean = (Step([4, 1, 30], (2, 4, 12, 20, 3), dtype) for _ in range(2))
    unread = [slot for slot in range(NUM_SLOTS) if slot not in step.slots.tolist()]
    step.kept[unread] = torch.nan
    step.matrices[unread] = torch.nan
    assert torch.equal(step.run(kernels), clean.run(kernels))


def test_gates(kernels, dtype):
    generator = torch.Generator().manual_seed(0)
    results, gates = (torch.randn((5, 37), generator=generator).to(dtype) for _ in range(2))
    gates[1], gates[2, 3] = 100.0, torch.nan
    expected = results.double() * torch.sigmoid(gates.double())
    kernels.gate_(results, gates)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(results.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_heads_that_are_too_large_are_refused():
    step = Step([1], (1, 1, 8, 257, 2), torch.float32)
    with pytest.raises(InvariantError, match="heads of 8 and 257 elements in a delta net"):
        step.run(native(torch.float32))


@pytest.mark.parametrize(("dtype", "kept_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_the_memory_of_states(tmp_path, dtype, kept_bytes):
    """Matrices are in float32 in every dtype; slots take at most half of the memory."""
    path = tiny_decoders.write(tmp_path, "qwen3_5")
    layer = 3 * (2 * 2 * 12 + 4 * 8) * kept_bytes + 4 * 12 * 8 * 4  # 4 of 5 layers have a delta net
    for slots, memory in ((20, 40 * 4 * layer), (2 * 64 + 1, 4 << 20)):
        runner = load(path, dtype=dtype, kv_cache_memory=memory, max_num_seqs=64)
        assert runner.info.state_slots == slots
        assert sum(part.nbytes for part in runner.states.parts) == slots * 4 * layer
