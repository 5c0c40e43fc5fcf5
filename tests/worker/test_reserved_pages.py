"""Memory in huge pages: alignment, sharing and release."""

import pytest
import torch
from helpers.mapped import is_mapped

from trioengine.worker.kernels.huge_pages import PAGE, HugePages, reserve

LINE = 64


@pytest.mark.parametrize("num_bytes", [0, 1, PAGE, PAGE + 1])
def test_memory_begins_with_a_page_and_keeps_its_content(num_bytes):
    memory = reserve(num_bytes)
    assert len(memory) == num_bytes
    assert memory.data_ptr() % PAGE == 0 or num_bytes == 0
    assert bool((memory.fill_(7) == 7).all())


def test_memory_is_given_back_with_the_last_tensor():
    memory = reserve(PAGE)
    last, address = memory[PAGE // 2 :], memory.data_ptr()
    del memory
    assert is_mapped(address)
    del last
    assert not is_mapped(address)


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 80])
def test_more_than_there_is(num_bytes):
    with pytest.raises(MemoryError, match=f"cannot reserve {num_bytes} bytes"):
        reserve(num_bytes)


def test_tensors_share_pages_and_no_lines():
    pages = HugePages()
    tensors = [pages.take(size).fill_(size % 251) for size in (1, 64, 65, 0, 100_000)]
    starts = [tensor.data_ptr() for tensor in tensors if len(tensor)]
    assert all(start % LINE == 0 for start in starts)
    assert starts[-1] - starts[0] == LINE + LINE + 2 * LINE
    assert all(bool((tensor == len(tensor) % 251).all()) for tensor in tensors)


def test_a_large_tensor_has_its_own_pages():
    pages = HugePages()
    small, large, after = pages.take(64).fill_(1), pages.take(100 << 20), pages.take(1)
    large[::PAGE] = 2
    assert len(large) == 100 << 20
    assert bool((small == 1).all())
    assert after.data_ptr() == small.data_ptr() + 64
    address = large.data_ptr()
    del large
    assert not is_mapped(address)


def test_tensors_are_written_in_any_mode():
    pages = HugePages()
    with torch.inference_mode():
        inside = pages.take(64)
    inside[:] = 1
    outside = pages.take(64)
    with torch.inference_mode():
        outside[:] = 2
    assert (int(inside.sum()), int(outside.sum())) == (64, 128)


def test_released_pages_are_given_back_with_their_tensors():
    pages = HugePages()
    before = pages.take(100)
    pages.release()
    after, address = pages.take(100), before.data_ptr()
    assert is_mapped(address)
    del before
    assert not is_mapped(address)
    assert is_mapped(after.data_ptr())
