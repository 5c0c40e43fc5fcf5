"""The cells of the notebook page, in a running asyncio loop and in a real kernel."""

import asyncio
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "notebook.md"
INTERRUPTED = """
import os
import signal

chunks = []
try:
    for chunk in session.generate("Write a long story.", max_tokens=900, ignore_eos=True):
        chunks.append(chunk)
        if len(chunks) == 3:
            os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    pass
else:
    raise AssertionError("it was not interrupted")
assert session.history == before
"""


def cells():
    """The blocks of the page that are run."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_cells_run_in_a_running_loop(smollm2):
    namespace = {}

    async def run():
        for cell in cells():
            exec(compile(cell, PAGE.name, "exec"), namespace)

    asyncio.run(run())
    assert "Madrid" in namespace["completion"].text
    assert namespace["engine"].loop._thread.is_alive() is False


def test_the_cells_run_in_a_kernel(smollm2, tmp_path, monkeypatch):
    """A cell that is interrupted stops its answer, and the next one goes on."""
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    *first, last = cells()
    others = [
        "before = session.history",
        INTERRUPTED,
        "assert session.ask('And of Italy?', max_tokens=16).text and len(session.history) == len(before) + 2",
    ]
    new = nbformat.v4
    notebook = new.new_notebook(cells=[new.new_code_cell(cell) for cell in (*first, *others, last)])
    client = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3")
    executed = client.execute()
    text = "".join(output.get("text", "") for cell in executed.cells for output in cell.get("outputs", ()))
    assert "Paris" in text
