"""Memory in huge pages: where it begins, who shares it, and when it is given back."""

from pathlib import Path

import pytest

from trioengine.worker.kernels.huge_pages import PAGE, HugePages, reserve

LINE = 64


def is_mapped(address):
    """Whether the process has memory there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


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
    with pytest.raises(MemoryError, match=f"{num_bytes} bytes cannot be had"):
        reserve(num_bytes)


def test_tensors_share_pages_and_no_lines():
    pages = HugePages()
    tensors = [pages.take(size).fill_(size % 251) for size in (1, 64, 65, 0, 100_000)]
    starts = [tensor.data_ptr() for tensor in tensors if len(tensor)]
    assert all(start % LINE == 0 for start in starts)
    assert starts[-1] - starts[0] == LINE + LINE + 2 * LINE
    assert all(bool((tensor == len(tensor) % 251).all()) for tensor in tensors)


def test_a_tensor_may_be_larger_than_the_pages_that_are_shared():
    pages = HugePages()
    small, large = pages.take(100).fill_(1), pages.take(100 << 20)
    large[::PAGE] = 2
    assert len(large) == 100 << 20
    assert bool((small == 1).all())


def test_released_pages_are_given_back_with_their_tensors():
    pages = HugePages()
    before = pages.take(100)
    pages.release()
    after, address = pages.take(100), before.data_ptr()
    assert is_mapped(address)
    del before
    assert not is_mapped(address)
    assert is_mapped(after.data_ptr())
