"""The latencies of a run as a picture: for each metric, the share of values that were at most so long."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trioengine.cli.bench.figures import values
from trioengine.cli.bench.load import Run
from trioengine.cli.bench.memory_curve import MB, MemorySample
from trioengine.cli.bench.sample import End
from trioengine.core.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

Point: TypeAlias = tuple[float, float]
MAX_POINTS = 200  # of a curve
_SUFFIXES = (".svg", ".png")


def check_plot(path: Path) -> None:
    """Raises InvalidConfig for what could not be drawn; before a run, not after it."""
    if path.suffix not in _SUFFIXES:
        raise InvalidConfig.of("plot", f"must be a file that ends in {' or '.join(_SUFFIXES)}, got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidConfig.of("plot", "needs matplotlib: pip install matplotlib")


def plot(run: Run, metrics: Sequence[str], path: Path) -> None:
    """Draw the completed requests' times."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    completed = [sample for sample in run.samples if sample.end is End.COMPLETED]
    figure = Figure(figsize=(4 * len(metrics), 3.2), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        times = sorted(1000 * value for value in values(completed, metric))
        axes.step(times, [(rank + 1) / len(times) for rank in range(len(times))], where="post")
        axes.set(title=metric.upper(), xlabel="ms", ylim=(0, 1))
        axes.set_xlim(left=0)
        axes.locator_params(axis="x", nbins=5)
        axes.grid(visible=True, alpha=0.3)
    figure.axes[0].set_ylabel("share")
    figure.savefig(path)


def plot_memory(samples: Sequence[MemorySample], path: Path) -> None:
    """Draw the memory of a process over time, in MB; the waves are shaded in turn."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    curves = {
        "resident + memfds": [(sample.at, sample.total / MB) for sample in samples],
        "resident": [(sample.at, sample.rss / MB) for sample in samples],
    }
    for label, points in curves.items():
        axes.plot(*zip(*thinned(points), strict=True), label=label)
    for wave in {sample.wave for sample in samples if sample.wave % 2}:
        during = [sample.at for sample in samples if sample.wave == wave]
        axes.axvspan(during[0], during[-1], alpha=0.1)
    axes.set(xlabel="s", ylabel="MB")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    axes.grid(visible=True, alpha=0.3)
    with rc_context({"svg.fonttype": "none"}):  # letters as text
        figure.savefig(path)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS of a curve's points: the lowest and the highest of each part of it."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = -(-2 * len(points) // MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [point for part in parts for point in sorted({min(part, key=_height), max(part, key=_height)})]


def _height(point: Point) -> float:
    return point[1]
