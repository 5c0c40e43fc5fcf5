"""Allocated memory lies in huge pages afterwards, where the kernel makes them, with the same content."""

import subprocess
import sys

from trioengine.cli.serve import full_mappings

SMAPS = """\
55d2ea800000-55d2eb400000 rw-p 00000000 00:00 0                          [heap]
Size:              12288 kB
Rss:                9216 kB
7f7200000000-7f7201000000 rw-p 00000000 00:00 0
Size:              16384 kB
Rss:               12284 kB
7f7210000000-7f7211000000 rw-p 00000000 00:00 0
Rss:               16384 kB
7f7220000000-7f7221000000 r--p 00000000 00:00 0
Rss:               16384 kB
7f7230000000-7f7231000000 rw-p 00000000 fe:00 42                         /usr/lib/libc.so.6
Rss:               16384 kB
7f7240000000-7f7241000000 rw-s 00000000 00:00 0
Rss:               16384 kB
7ffd00000000-7ffd01000000 rw-p 00000000 00:00 0                          [stack]
Rss:               16384 kB
"""

MOVE = """
from trioengine.cli.serve import use_huge_pages
def in_memory(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/smaps_rollup") if line.startswith(name))
kept = [bytes([index % 256]) * 100 for index in range(400_000)]
huge, resident = in_memory("AnonHugePages"), in_memory("Rss")
moved = use_huge_pages()
assert all(text == bytes([index % 256]) * 100 for index, text in enumerate(kept))
print(moved, in_memory("AnonHugePages") - huge, in_memory("Rss") - resident)
"""


def test_the_mappings_that_are_moved_are_private_writable_of_no_file_and_nearly_full():
    assert list(full_mappings(SMAPS.splitlines())) == [
        (0x55D2EA800000, 0x55D2EB400000),
        (0x7F7210000000, 0x7F7211000000),
    ]


def test_what_is_moved_is_in_huge_pages_and_no_larger():
    told = subprocess.run([sys.executable, "-c", MOVE], check=True, capture_output=True, text=True).stdout
    moved, huge, grown = map(int, told.split())
    assert moved == huge
    assert grown < 8 << 20
