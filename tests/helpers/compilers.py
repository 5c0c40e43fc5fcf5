"""Libraries to compile, in a home of their own, by compilers that a test chooses."""

import os
import shutil

from helpers.torch_driver import needs_compiler

SOURCE = 'extern "C" int answer() { return ANSWER; }'
WHEN_COMPILING = '#!/bin/sh\ncase "$*" in *" -c "*) {do};; esac\nexec {compiler} "$@"\n'
COUNTING = '#!/bin/sh\necho "$@" >> {log}\nexec {compiler} "$@"\n'


def own_home(tmp_path, monkeypatch):
    """Keep libraries below `tmp_path`; returns their folder, which does not exist yet."""
    needs_compiler()
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "kernels"


def write_source(tmp_path):
    path = tmp_path / "source.cpp"
    path.write_text(SOURCE)
    return path


def count_compilations(tmp_path, monkeypatch):
    """Return a function: how often the compiler has made an object file so far."""
    log = tmp_path / "log"
    use_compiler(tmp_path, monkeypatch, COUNTING.format(log=log, compiler=shutil.which("g++")))
    return lambda: sum(" -c " in line for line in log.read_text().splitlines())


def use_compiler(tmp_path, monkeypatch, script):
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "g++").write_text(script)
    (directory / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
