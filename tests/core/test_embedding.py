"""Vectors of embeddings: their bytes, their first dimensions, and the bounds of these."""

import struct

import pytest

from trioengine import Embeddings, RequestRejected, Usage
from trioengine.core.embedding import bytes_of, check_dimensions, vector_of

DATA = struct.pack("<4f", 0.5, -0.5, 0.5, 0.5)


def test_a_vector_is_its_bytes():
    assert vector_of(DATA).tolist() == [0.5, -0.5, 0.5, 0.5]
    assert bytes_of(vector_of(DATA)) == DATA


@pytest.mark.parametrize("dimensions", [4, 5])
def test_all_dimensions_change_nothing(dimensions):
    assert bytes_of(vector_of(DATA, dimensions)) == DATA


def test_the_first_dimensions_have_the_length_1():
    assert vector_of(DATA, 1).tolist() == [1.0]
    assert vector_of(DATA, 2).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert vector_of(bytes(8) + DATA, 2).tolist() == [0.0, 0.0]


def test_the_bounds_of_dimensions():
    assert [check_dimensions(value, 8) for value in (None, 1, 8)] == [None, 1, 8]
    for wrong in (0, 9, -1, 1.5, "3", True):
        with pytest.raises(RequestRejected, match="dimensions must be an integer from 1 to 8, got") as caught:
            check_dimensions(wrong, 8)
        assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("vectors", "text"),
    [
        ((), "<Embeddings 0 vectors of 0 numbers>"),
        ((vector_of(DATA),), "<Embeddings 1 vector of 4 numbers>"),
    ],
)
def test_their_text_has_no_numbers(vectors, text):
    assert repr(Embeddings(vectors, Usage(0, 0, 0))) == text
