"""The safetensors header: the real library's files pass, each lie is named, and nothing but ModelError is raised."""

import json
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from trioengine.core.errors import ModelError
from trioengine.hub.safetensors import MAX_HEADER, StoredTensor, read_header


def safetensors(header, data=b"", *, length=None):
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def place(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


VALID = safetensors(
    {
        "__metadata__": {"format": "pt"},
        "b": place(8, 12, [2], "BF16"),
        "a": place(0, 8, [1, 2]),
        "c": place(12, 16, []),
    },
    bytes(16),
)


def test_a_whole_file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(VALID)
    assert read_header(path) == {
        "b": StoredTensor(path, "b", "BF16", (2,), 4),
        "a": StoredTensor(path, "a", "F32", (1, 2), 8),
        "c": StoredTensor(path, "c", "F32", (), 4),
    }
    path.write_bytes(safetensors({}))
    assert read_header(path) == {}
    path.write_bytes(safetensors({"a": place(0, 1, [2], "F4"), "none": place(1, 1, [0, 3], "I64")}, b"1"))
    read_header(path)


def test_a_file_of_the_reference_implementation(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"b": np.ones((3, 5), np.float16), "a": np.ones(3, np.float32)}, path, {"format": "pt"})
    read_header(path)


BAD = {
    "shorter than a header's length": b"1234567",
    f"a header of {MAX_HEADER + 1} bytes (the limit is {MAX_HEADER})": safetensors(b"{}", length=MAX_HEADER + 1),
    "truncated: a header of 3 bytes in a file of 10": safetensors(b"{}", length=3),
    "the header is not JSON": safetensors(b"{"),
    "not a safetensors file: the header is not JSON": safetensors(b"\xff"),
    "file: the header is not JSON": safetensors(b"[" * 100_000),
    "the header is not a JSON object": safetensors([]),
    "'a' is in the header twice": safetensors(b'{"a": 1, "b": 2, "a": 3}'),
    "tensor 'a' is not a JSON object": safetensors({"a": 3}),
    "tensor 'a' has the unknown dtype 'F7'": safetensors({"a": place(0, 4, [1], "F7")}, bytes(4)),
    "tensor 'a' has the unknown dtype ['F32']": safetensors({"a": place(0, 4, [1], ["F32"])}, bytes(4)),
    "tensor 'a' has the shape [-1], which is not a list of at most 8 sizes": safetensors(
        {"a": place(0, 4, [-1])}, bytes(4)
    ),
    "tensor 'a' has the shape [True], which is": safetensors({"a": place(0, 4, [True])}, bytes(4)),
    "tensor 'a' has the shape 1, which is": safetensors({"a": place(0, 4, 1)}, bytes(4)),
    "tensor 'a' has the shape [9223372036854775808], which is": safetensors({"a": place(0, 4, [1 << 63])}, bytes(4)),
    "tensor 'a' has the shape [1, 1, 1, 1, 1, 1, 1, 1, 1], which": safetensors({"a": place(0, 4, [1] * 9)}, bytes(4)),
    r"tensor '\x1b[31m' is not a JSON object": safetensors({"\x1b[31m": 3}),
    "tensor 'a' has the data_offsets [4, 0], which are no": safetensors({"a": place(4, 0, [1])}, bytes(4)),
    "tensor 'a' has the data_offsets [0, 4, 8], which": safetensors(
        {"a": place(0, 4, [1]) | {"data_offsets": [0, 4, 8]}}
    ),
    "tensor 'a' has the data_offsets None, which": safetensors({"a": {"dtype": "F32", "shape": []}}),
    "tensor 'a' has 8 bytes, which is not F32 of the shape [3]": safetensors({"a": place(0, 8, [3])}, bytes(8)),
    "truncated: tensor 'a' ends 1 bytes beyond its end": safetensors({"a": place(0, 4, [1])}, bytes(3)),
    "tensor 'b' overlaps the tensor": safetensors({"a": place(0, 8, [2]), "b": place(4, 8, [1])}, bytes(8)),
    "tensor 'b' leaves a hole of 4 bytes": safetensors({"a": place(0, 4, [1]), "b": place(8, 12, [1])}, bytes(12)),
    "5 bytes after the last tensor belong to no tensor": safetensors({"a": place(0, 4, [1])}, bytes(9)),
}


@pytest.mark.parametrize("message", BAD)
def test_a_violation_of_the_format_is_named(message, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD[message])
    with pytest.raises(ModelError) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_as_many_names_as_a_header_holds_and_one_of_them_twice(tmp_path):
    """In linear time: looking each name up in a list of them would take hours."""
    path = tmp_path / "model.safetensors"
    names = [f'"{number}":0' for number in range(250_000)]
    path.write_bytes(safetensors(f"{{{','.join([*names, names[-1]])}}}".encode()))
    with pytest.raises(ModelError, match="'249999' is in the header twice"):
        read_header(path)


def test_a_header_of_many_values(tmp_path):
    """A list takes thirty times as much memory as its text."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(b"[" + b"[]," * 300_000 + b"0]"))
    with pytest.raises(ModelError, match="the header is not JSON: more than 262144 values"):
        read_header(path)


def test_a_missing_file(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        read_header(tmp_path / "model.safetensors")


@given(st.integers(0, len(VALID) - 1))
def test_a_truncated_file_is_refused(length):
    with pytest.raises(ModelError):
        check(VALID[:length])


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 17), st.integers(1, 255)), min_size=1, max_size=6))
def test_a_damaged_header_is_refused_or_read(flips):
    damaged = bytearray(VALID)
    for position, flip in flips:
        damaged[position] ^= flip
    try:
        check(damaged)
    except ModelError:
        return


def check(content):
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(content)
        file.flush()
        read_header(Path(file.name))
