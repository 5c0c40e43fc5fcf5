"""Record docs/recording.svg: a chat whose worker is killed in the middle of an answer: `python docs/make_recording.py`.

Runs the real `trioengine chat` on a separate terminal, types a question, kills the worker with SIGKILL, and draws the
text with the times at which it appeared. Waits of more than LONGEST_WAIT seconds, which a busy machine needs to start a
worker, are shortened. Requires the default model.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

PICTURE = Path(__file__).with_name("recording.svg")
COLUMNS = 80
COMMAND = ["chat", "--temperature", "0", "--max-tokens", "160"]
QUESTION = "Why is the sky blue? Explain it in a few sentences."
KILL_AFTER = 190  # characters of the answer
LONGEST_WAIT = 4.0  # seconds between two texts; a longer wait is drawn as one of this length
PAUSE, HOLD = 0.6, 5.0  # seconds before the question is typed, and after the last line
PATIENCE = 120.0  # seconds
KEY = 0.045  # seconds between two keys
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x07\r]")
_CELL, _LINE, _MARGIN = 8.4, 20, 16  # pixels


class Text(NamedTuple):
    """Text that appears at a time, in seconds, at the end of a pane."""

    time: float
    pane: int
    text: str
    kind: str = ""


class Recorder:
    """A process on a terminal, and its text with times."""

    def __init__(self) -> None:
        self._master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trioengine", *COMMAND],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb", "INPUTRC": "/dev/null"},
        )
        os.close(terminal)
        self._start = time.monotonic()
        self.shown: list[Text] = [Text(0, 0, f"$ trioengine {' '.join(COMMAND)}\n", "typed")]

    def now(self) -> float:
        return time.monotonic() - self._start

    def length(self) -> int:
        return sum(len(piece.text) for piece in self.shown)

    def read(self, seconds: float) -> None:
        """Take the text that the process writes within this time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and select.select([self._master], [], [], left)[0]:
            text = _ESCAPES.sub("", os.read(self._master, 4096).decode("utf-8", "replace"))
            if len(self.shown) == 1:
                text = text.lstrip()  # remains of the progress bar
            if text:
                self.shown.append(Text(self.now(), 0, text))

    def until(self, text: str, since: int) -> None:
        """Read until the text has come after the first `since` pieces."""
        deadline = time.monotonic() + PATIENCE
        while text not in "".join(piece.text for piece in self.shown[since:]):
            assert time.monotonic() < deadline, "no answer from the chat"
            self.read(0.05)

    def type(self, text: str) -> None:
        for key in text:
            os.write(self._master, key.encode())
            self.read(KEY)

    def kill_worker(self) -> int:
        """SIGKILL to the process that runs the model; returns its id."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (worker,) = (int(child) for child in children if b"trioengine.worker" in _command_line(child))
        os.kill(worker, signal.SIGKILL)
        return worker


def _command_line(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def record() -> list[Text]:
    """Record the chat from its start to the next prompt, and the line of the other terminal."""
    recorder = Recorder()
    try:
        recorder.until("\n> ", 1)
        recorder.read(PAUSE)
        recorder.type(QUESTION + "\n")
        begun, pieces = recorder.length(), len(recorder.shown)
        while recorder.length() < begun + KILL_AFTER:
            recorder.read(0.02)
        worker = recorder.kill_worker()
        killed = Text(recorder.now(), 1, f"$ kill -9 {worker}    # the process that runs the model\n", "typed")
        recorder.until("\n> ", pieces)
    finally:
        recorder.process.kill()
        recorder.process.wait()
    return shortened(sorted([*recorder.shown, killed]))


def shortened(pieces: list[Text]) -> list[Text]:
    """Return the pieces in their order, with every wait between two of them cut to LONGEST_WAIT."""
    cut, before, result = 0.0, 0.0, []
    for piece in pieces:
        cut += max(0.0, piece.time - before - LONGEST_WAIT)
        before = piece.time
        result.append(piece._replace(time=piece.time - cut))
    return result


class Run(NamedTuple):
    """Text on one line that appears at once."""

    time: float
    row: int
    column: int
    text: str
    kind: str


def runs_of(pieces: list[Text]) -> list[Run]:
    """Return the text of one pane, in lines of at most COLUMNS."""
    row, column, runs = 0, 0, []
    for piece in pieces:
        for part in re.findall(r"\n|[^\n]+", piece.text):
            while part != "\n" and part:
                taken, part = part[: COLUMNS - column], part[COLUMNS - column :]
                runs.append(Run(piece.time, row, column, taken, piece.kind))
                column += len(taken)
                if column == COLUMNS:
                    row, column = row + 1, 0
            if part == "\n":
                row, column = row + 1, 0
    return runs


_STYLE = """
svg { color-scheme: light dark; }
.window { fill: #f6f8fa; stroke: #d0d7de; }
.title { fill: #59636e; font: 13px system-ui, sans-serif; }
.text { fill: #1f2328; font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
        white-space: pre; }
.typed { fill: #0969da; }
.kill { fill: #cf222e; }
@media (prefers-color-scheme: dark) {
  .window { fill: #151b23; stroke: #3d444d; }
  .title { fill: #9198a1; }
  .text { fill: #e6edf3; }
  .typed { fill: #58a6ff; }
  .kill { fill: #ff7b72; }
}
@media (prefers-reduced-motion: reduce) { .text { animation: none !important; visibility: visible !important; } }
"""


def picture(pieces: list[Text]) -> str:
    """Draw the recording as an animated SVG that repeats."""
    duration = max(piece.time for piece in pieces) + HOLD
    panes = [runs_of([piece for piece in pieces if piece.pane == pane]) for pane in (0, 1)]
    width = COLUMNS * _CELL + 2 * _MARGIN
    parts, styles, top = [], [_STYLE], 0.0
    for title, runs in zip(("a chat", "another terminal"), panes, strict=True):
        rows = max(run.row for run in runs) + 1
        height = 34 + rows * _LINE + _MARGIN / 2
        parts.append(f'<rect class="window" x="0.5" y="{top + 0.5}" width="{width - 1:g}" height="{height:g}" rx="6"/>')
        parts.append(f'<text class="title" x="{_MARGIN}" y="{top + 22:g}">{title}</text>')
        for run in runs:
            name = f"k{len(styles)}"
            share = 100 * run.time / duration
            styles.append(f"@keyframes {name} {{ 0% {{ visibility: hidden }} {share:.2f}% {{ visibility: visible }} }}")
            kind = "kill" if "kill" in run.text and title != "a chat" else run.kind
            parts.append(
                f'<text class="{" ".join(filter(None, ("text", kind)))}" x="{_MARGIN + run.column * _CELL:.1f}" '
                f'y="{top + 50 + run.row * _LINE:g}" textLength="{len(run.text) * _CELL:.1f}" '
                f'style="animation: {name} {duration:.2f}s step-end infinite">{escape(run.text)}</text>'
            )
        top += height + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {top:g}" width="{width:g}" height="{top:g}"'
    label = "A chat whose worker is killed in the middle of an answer: after a pause the answer continues."
    styled = "\n".join(styles)
    return f'{head} role="img">\n<title>{label}</title>\n<style>{styled}</style>\n' + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(record()))
