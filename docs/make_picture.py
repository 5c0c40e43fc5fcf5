"""Draw docs/sessions.svg, the picture at the top of the README: `python docs/make_picture.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PICTURE = Path(__file__).with_name("sessions.svg")
LEFT, STEP, LANE = 108, 52, 44  # pixels: width of the labels, distance of two steps, of two lanes
BOX, HEIGHT = 40, 26
FIRST_LANE, BATCH, WORKER = 64, 212, 306  # y of each part's top
CANCEL, DEATH, REBIRTH, LAST = 5, 8, 10, 13  # columns: session 2 is gone, no worker, the next, the end
SESSIONS = {  # by number: the steps in which it gets a token
    1: [*range(1, DEATH), *range(REBIRTH, LAST)],
    2: [*range(1, CANCEL)],
    3: [*range(3, DEATH), *range(REBIRTH, LAST)],
}
WIDTH, TOTAL = LEFT + STEP * (LAST - 1) + 12, 362

STYLE = """
svg { color-scheme: light dark; }
text { fill: #1f2328; font: 14px system-ui, sans-serif; }
.small { font-size: 12px; fill: #59636e; }
.code { font: 12px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.s1 { fill: #0969da; } .s2 { fill: #bf8700; } .s3 { fill: #8250df; }
.end { stroke: #cf222e; stroke-width: 2; stroke-dasharray: 4 3; }
.why { fill: #cf222e; }
.line { stroke: #d0d7de; stroke-width: 1; }
.worker { fill: #eaeef2; stroke: #d0d7de; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .s1 { fill: #4493f8; } .s2 { fill: #d29922; } .s3 { fill: #ab7df8; }
  .end { stroke: #ff7b72; }
  .why { fill: #ff7b72; }
  .line { stroke: #3d444d; }
  .worker { fill: #212830; stroke: #3d444d; }
}
"""


def picture() -> str:
    """Return the whole file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOTAL}" width="{WIDTH}" height="{TOTAL}"'
    title = (
        "Three sessions as lanes. The second is cancelled: the next step of the batch has no row for it. "
        "The worker is killed: the other two continue on the next worker."
    )
    body = "\n".join([*steps(), *lanes(), *batch(), *workers(), *ends()])
    return f'{head} role="img">\n<title>{title}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def x_of(step: int) -> float:
    """Return the left side of a step's boxes."""
    return LEFT + (step - 1) * STEP


def text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{content}</text>'


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'


def steps() -> Iterator[str]:
    yield text(8, 20, "step", "small")
    for count, step in enumerate([*range(1, DEATH), *range(REBIRTH, LAST)], 1):
        yield text(x_of(step) + BOX / 2 - 4, 20, str(count), "small")


def lanes() -> Iterator[str]:
    for session, tokens in SESSIONS.items():
        y = FIRST_LANE + (session - 1) * LANE
        yield text(8, y + 18, f"session {session}")
        end = x_of(tokens[-1]) + BOX
        yield f'<line x1="{x_of(tokens[0])}" y1="{y + HEIGHT / 2}" x2="{end}" y2="{y + HEIGHT / 2}" class="line"/>'
        for step in tokens:
            yield box(x_of(step), y, BOX, HEIGHT, f"s{session}")


def batch() -> Iterator[str]:
    """Draw the rows of each step, stacked."""
    yield text(8, BATCH + 40, "rows of")
    yield text(8, BATCH + 58, "the batch")
    for step in range(1, LAST):
        rows = [session for session, tokens in SESSIONS.items() if step in tokens]
        for index, session in enumerate(rows):
            yield box(x_of(step), BATCH + 52 - 20 * index, BOX, 16, f"s{session}")


def workers() -> Iterator[str]:
    yield text(8, WORKER + 19, "worker")
    for number, first, end in ((1, 1, DEATH), (2, REBIRTH, LAST)):
        yield box(x_of(first), WORKER, x_of(end) - x_of(first) - STEP + BOX, HEIGHT, "worker")
        yield text(x_of(first) + 10, WORKER + 18, f"process {number}", "small")


def ends() -> Iterator[str]:
    """Draw the cancellation and the death as lines through all affected parts."""
    for step, top, bottom in ((CANCEL, FIRST_LANE + LANE - 10, BATCH + 76), (DEATH, FIRST_LANE - 10, WORKER + 30)):
        x = x_of(step) - (STEP - BOX) / 2
        yield f'<line x1="{x:g}" y1="{top}" x2="{x:g}" y2="{bottom}" class="end"/>'
    yield text(x_of(CANCEL) + 4, FIRST_LANE + LANE + 18, "cancelled: no row", "why small")
    yield text(x_of(DEATH) - 2, FIRST_LANE - 22, "kill -9 of the worker: the streams continue", "why small")
    yield text(x_of(DEATH) + 2, WORKER + 18, "next one starts", "small")
    yield text(
        x_of(1),
        WORKER + 46,
        "the other two keep their text so far; the next process computes the rest",
        "small",
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
