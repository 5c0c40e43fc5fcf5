"""A separate Python process, for checks that the running one cannot make."""

import subprocess
import sys
from pathlib import Path

import pytest

import trioengine

_SOURCE = str(Path(trioengine.__file__).parent.parent)


@pytest.fixture
def run_python():
    """Run code with this trioengine and the given options (-S: no installed package); returns its output."""

    def run_python(code: str, *options: str) -> str:
        command = [sys.executable, *options, "-c", f"import sys; sys.path.insert(0, {_SOURCE!r})\n{code}"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    return run_python
