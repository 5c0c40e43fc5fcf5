"""The picture of a process's memory: a small file, however long the run was."""

from xml.etree import ElementTree

import pytest

from trioengine.cli.bench.payload import MB, MemorySample, plot_memory
from trioengine.cli.bench.report import MAX_POINTS, thinned


def samples(count):
    """A saw of 500 MB in waves of a hundred samples."""
    return [MemorySample(i / 10, 90 * MB, i % 37 * 500 * MB // 36, 0, i // 100 % 5) for i in range(count)]


def test_a_long_run_is_a_small_picture(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    pytest.importorskip("matplotlib")
    picture = tmp_path / "picture.svg"
    plot_memory(samples(20_000), picture)
    text = picture.read_text()
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert "resident + memfds</text>" in text  # and not drawn letter by letter
    assert len(text) < 60_000


@pytest.mark.parametrize("count", [0, 1, MAX_POINTS, MAX_POINTS + 1, 20_000])
def test_the_heights_and_depths_are_kept(count):
    points = [(float(i), float(i % 37)) for i in range(count)]
    kept = thinned(points)
    assert kept == points if count <= MAX_POINTS else kept == sorted(set(kept) & set(points))
    assert MAX_POINTS // 2 < len(kept) <= MAX_POINTS or kept == points
    assert {height for _, height in kept} >= {height for _, height in points if height in (0, min(36, count - 1))}
