"""The memory of this process."""

from pathlib import Path


def is_mapped(address):
    """Whether the address is mapped in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False
