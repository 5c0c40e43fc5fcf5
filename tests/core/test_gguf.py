"""The GGUF header: a tiny writer, each thing that can be wrong, and no exception but ModelError whatever the bytes."""

import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trioengine.core.errors import ModelError
from trioengine.core.gguf import MAX_DECODED, MAX_TENSORS, MAX_TEXT, GGUFTensor, TensorType, Undecoded, parse_gguf

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind, content):
    return string(content) if kind == STRING else struct.pack("<" + CODES[kind], content)


def entry(key, kind, content):
    """One metadata entry; a list is an array of `kind`."""
    if not isinstance(content, list):
        return string(key) + struct.pack("<I", kind) + value(kind, content)
    head = string(key) + struct.pack("<IIQ", ARRAY, kind, len(content))
    return head + b"".join(value(kind, one) for one in content)


def tensor(name, dimensions, kind=0, offset=0):
    return string(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def gguf(entries=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, counts=None, alignment=32):
    tensor_count, entry_count = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, tensor_count, entry_count) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


EVERY_KIND = [
    ("u8", U8, 200),
    ("i8", I8, -100),
    ("u16", U16, 60_000),
    ("i16", I16, -30_000),
    ("u32", U32, 4_000_000_000),
    ("i32", I32, -2_000_000_000),
    ("f32", F32, 0.5),
    ("bool", BOOL, True),
    ("string", STRING, "grün"),
    ("u64", U64, 1 << 63),
    ("i64", I64, -(1 << 62)),
    ("f64", F64, 0.1),
    ("numbers", I32, [1, -2, 3]),
    ("strings", STRING, ["a", "", "ß"]),
    ("nothing", U8, []),
]
VALID = gguf(
    [entry(*fields) for fields in EVERY_KIND],
    [tensor("a", (4, 2)), tensor("b", (32,), kind=8, offset=32), tensor("scalar", (), offset=96)],
    bytes(100),
)
DATA = len(VALID) - 100
ARRAYS = {"numbers", "strings", "nothing"}


def test_metadata_and_tensors():
    header = parse_gguf(VALID, arrays=ARRAYS)
    assert header.metadata == {key: content for key, _, content in EVERY_KIND}
    assert header.tensors == (
        GGUFTensor("a", (2, 4), TensorType.F32, DATA, 32),
        GGUFTensor("b", (32,), TensorType.Q8_0, DATA + 32, 34),
        GGUFTensor("scalar", (), TensorType.F32, DATA + 96, 4),
    )


def test_version_2_and_another_alignment():
    content = gguf(
        [entry("general.alignment", U32, 8)], [tensor("a", (1,), offset=8)], bytes(12), version=2, alignment=8
    )
    assert parse_gguf(content).tensors[0].offset == len(content) - 4


def test_any_buffer_will_do():
    padded = VALID + bytes(-len(VALID) % 4)
    assert parse_gguf(memoryview(array("I", padded))) == parse_gguf(bytearray(padded)) == parse_gguf(VALID)


def test_other_arrays_are_passed_over():
    header = parse_gguf(VALID, arrays={"strings"})
    assert header.metadata["strings"] == ["a", "", "ß"]
    assert header.metadata["numbers"] == Undecoded("array", 3)
    assert len(header.metadata["numbers"]) == 3 and repr(header.metadata["numbers"]) == "<array of length 3>"
    assert header.tensors == parse_gguf(VALID, arrays=ARRAYS).tensors
    assert parse_gguf(VALID).metadata["strings"] == Undecoded("array", 3)


def test_a_long_string_is_passed_over():
    header = parse_gguf(gguf([entry("long", STRING, "x" * (MAX_TEXT + 1)), entry("short", STRING, "x" * MAX_TEXT)]))
    assert header.metadata == {"long": Undecoded("string", MAX_TEXT + 1), "short": "x" * MAX_TEXT}


def array_of(kind, count, size):
    """An array of zeros, or of empty strings."""
    return string("a") + struct.pack("<IIQ", ARRAY, kind, count) + bytes(count * size)


@pytest.mark.parametrize(
    "content",
    [
        gguf([array_of(U8, MAX_DECODED // 16, 1)]),
        gguf([array_of(STRING, MAX_DECODED // 64, 8)]),
        gguf([string("a") + struct.pack("<IIQ", ARRAY, STRING, 15) + string("x" * MAX_TEXT) * 15]),
        gguf([entry(f"{number}", STRING, "x" * MAX_TEXT) for number in range(15)]),
        gguf([entry(f"{number}{'k' * 65_530}", U8, 0) for number in range(300)]),
    ],
    ids=["numbers", "empty strings", "strings", "texts", "keys"],
)
def test_a_header_that_would_take_too_much_memory(content):
    """Holes in a sparse file read as zeros: they cost its author nothing."""
    with pytest.raises(ModelError, match="the header would take more than 56 MiB of memory"):
        parse_gguf(content, arrays={"a"})


BAD = {
    "not a GGUF file": gguf(magic=b"GGML"),
    "the file ends in the magic": b"GG",
    "the file ends in the version": b"GGUF\3",
    "GGUF version 1 is not supported, only 2 and 3 are": gguf(version=1),
    "claims 1000000 tensors, more than it can hold": gguf(counts=(1_000_000, 0)),
    "claims 9223372036854775808 metadata entries": gguf(counts=(0, 1 << 63)),
    "the file ends in the number of tensors": b"GGUF" + struct.pack("<I", 3),
    "metadata key 'a' is there twice": gguf([entry("a", U8, 1)] * 2),
    "a metadata key is 65537 bytes long; at most 65536 are supported": gguf([entry("k" * 65537, U8, 1)]),
    "a metadata key is not UTF-8": gguf([entry(b"\xff", U8, 1)]),
    "'a' has the unknown type 13": gguf([string("a") + struct.pack("<I", 13)]),
    "'a' is an array of the type 9, which is not supported": gguf([string("a") + struct.pack("<II", ARRAY, ARRAY)]),
    "claims 99 elements of 'a', more": gguf([string("a") + struct.pack("<IIQ", ARRAY, U32, 99)]),
    "claims 98 elements of 'a', more": gguf([string("a") + struct.pack("<IIQ", ARRAY, STRING, 98)]),
    "the file ends in 'a'": gguf([string("a") + struct.pack("<IIQQ", ARRAY, STRING, 1, 1 << 62)]),
    "'t' is not UTF-8": gguf([entry("t", STRING, [b"\xff"])]),
    "the file ends in 'b'": gguf([string("b") + struct.pack("<IIQ", ARRAY, STRING, 2) + string("12345678901")])[:68],
    "'s' is not UTF-8": gguf([entry("s", STRING, b"\xff")]),
    "general.alignment must be a power of two, got 24": gguf([entry("general.alignment", U32, 24)]),
    "general.alignment must be a power of two, got 0": gguf([entry("general.alignment", U32, 0)]),
    "general.alignment must be a power of two, got '32'": gguf([entry("general.alignment", STRING, "32")]),
    "tensor 'a' has 5 dimensions; at most 4 are supported": gguf((), [tensor("a", (1,) * 5)]),
    "tensor 'a' has type 4, which is not supported; supported: F32": gguf((), [tensor("a", (1,), kind=4)]),
    f"the file has {MAX_TENSORS + 1} tensors; at most {MAX_TENSORS} are supported": gguf(
        counts=(MAX_TENSORS + 1, 0), data=bytes(24 * MAX_TENSORS + 24)
    ),
    r"tensor '\x1b[31m\x07' is there twice": gguf((), [tensor("\x1b[31m\a", (1,))] * 2, bytes(4)),
    "tensor 'a' is there twice": gguf((), [tensor("a", (1,))] * 2, bytes(4)),
    "tensor 'a' has the shape [0], which F32 cannot store": gguf((), [tensor("a", (0,))]),
    "tensor 'a' has the shape [2, 31], which Q8_0 cannot store": gguf((), [tensor("a", (31, 2), kind=8)], bytes(99)),
    "tensor 'a' is not aligned to 32 bytes": gguf((), [tensor("a", (1,), offset=4)], bytes(99)),
    "truncated: tensor 'a' ends 1 bytes beyond its end": gguf((), [tensor("a", (8,))], bytes(31)),
    "tensor 'b' ends 18446744073709551584 bytes beyond": gguf(
        (), [tensor("b", (8,), offset=(1 << 64) - 32)], bytes(32)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_wrong_is_said(message):
    with pytest.raises(ModelError) as caught:
        parse_gguf(BAD[message], "some.gguf", arrays={"a", "b", "t"})
    assert str(caught.value).startswith("some.gguf: ")
    assert message in str(caught.value)


@given(st.integers(0, len(VALID) - 1))
def test_a_truncated_file_is_refused(length):
    with pytest.raises(ModelError):
        parse_gguf(VALID[:length])


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(1, 255)), min_size=1, max_size=6))
def test_a_damaged_file_is_refused_or_read(flips):
    damaged = bytearray(VALID)
    for position, flip in flips:
        damaged[position] ^= flip
    refused_or_inside(damaged)


@given(st.binary(max_size=300))
def test_any_bytes_behind_the_magic_are_refused_or_read(data):
    refused_or_inside(b"GGUF\3\0\0\0" + data)


def refused_or_inside(content):
    try:
        header = parse_gguf(content)
    except ModelError:
        return
    assert all(one.offset > 0 and one.offset + one.nbytes <= len(content) for one in header.tensors)


def test_tensors_that_overlap():
    tensors = [tensor("a", [16]), tensor("b", [16], offset=32)]
    with pytest.raises(ModelError, match="tensors 'a' and 'b' overlap"):
        parse_gguf(gguf((), tensors, bytes(96)))


def test_a_key_that_is_there_twice_is_seen_though_it_is_not_decoded():
    with pytest.raises(ModelError, match="twice"):
        parse_gguf(gguf([entry("k", U8, [1]), entry("k", U8, [1])]))
