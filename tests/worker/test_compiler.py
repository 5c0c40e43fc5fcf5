"""Compiling kernels: once for all, beside the models, and what is said where it does not work."""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import stat
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from helpers.compilers import SOURCE, WHEN_COMPILING, count_compilations, own_home, use_compiler, write_source
from helpers.torch_driver import generate, load

from trioengine.core.errors import ModelError
from trioengine.worker.compiler import CompilerMissing, KernelsUnavailable, load_library


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    return own_home(tmp_path, monkeypatch)


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path)


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    return count_compilations(tmp_path, monkeypatch)


def test_compiled_once(source, home, compilations):
    assert load_library([source], {"ANSWER": 42}).answer() == 42
    assert load_library([source], {"ANSWER": 42}).answer() == 42
    assert compilations() == 1
    assert [path.suffix for path in home.iterdir()] == [".so"]
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_each_for_its_macros_and_its_source(source, home, compilations):
    assert [load_library([source], {"ANSWER": number}).answer() for number in (1, 2, 1)] == [1, 2, 1]
    source.write_text(SOURCE.replace("ANSWER;", "ANSWER + 1;"))
    assert load_library([source], {"ANSWER": 1}).answer() == 2
    assert compilations() == 3
    assert len(list(home.iterdir())) == 3


def test_another_version_of_the_compiler(source, tmp_path, home, monkeypatch):
    """Its macros tell: so do those of another CPU, whose home this may be, too."""
    load_library([source], {"ANSWER": 1})
    use_compiler(tmp_path, monkeypatch, f'#!/bin/sh\nexec {shutil.which("g++")} -D__NEW__ "$@"\n')
    before = set(home.iterdir())
    load_library([source], {"ANSWER": 1})
    assert len(set(home.iterdir()) - before) == 1


def test_many_at_once(source, home):
    """Each loads a whole library, whoever has made it."""
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(load_library([source], {"ANSWER": 7}).answer()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [7] * 4
    assert [path.suffix for path in home.iterdir()] == [".so"]


def test_a_home_that_cannot_be_made(source, tmp_path, monkeypatch, compilations):
    """Compiled at every start, then."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "file"))
    assert load_library([source], {"ANSWER": 3}).answer() == 3
    assert load_library([source], {"ANSWER": 3}).answer() == 3
    assert compilations() == 2
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("damage", [b"", b"\x7fELF no more"])
def test_a_library_that_was_damaged(source, home, tmp_path, monkeypatch, compilations, damage):
    """It is made anew, once. (In another home: this process has its first one open.)"""
    load_library([source], {"ANSWER": 6})
    (sound,) = home.iterdir()
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "another"))
    damaged = tmp_path / "another" / "kernels" / sound.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(damage)
    for _ in range(2):
        assert load_library([source], {"ANSWER": 6}).answer() == 6
    assert len(damaged.read_bytes()) == len(sound.read_bytes())
    assert compilations() == 2


def test_nowhere_to_compile(source, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(KernelsUnavailable, match=r"nothing can be compiled: .*missing"):
        load_library([source], {})


def test_no_source(tmp_path):
    with pytest.raises(KernelsUnavailable, match=r"nothing can be compiled: .*nothing\.cpp"):
        load_library([tmp_path / "nothing.cpp"], {})


def test_no_user(source, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_HOME", "~nobody-of-that-name/x")
    assert load_library([source], {"ANSWER": 4}).answer() == 4


def test_no_compiler(source, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CompilerMissing, match=r"no C\+\+ compiler found; install g\+\+"):
        load_library([source], {"ANSWER": 1})


def test_a_source_that_is_wrong(source, home):
    source.write_text("int x = y;")
    with pytest.raises(KernelsUnavailable, match=r"g\+\+ fails: .*source.cpp:1:9: error: .*y.* was not declared"):
        load_library([source], {})
    assert not home.exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("#!/bin/sh\necho 'no licence' >&2\nexit 3\n", r"g\+\+ fails: no licence"),
        ("#!/bin/sh\nexit 3\n", r"g\+\+ fails: exit status 3"),
        ("#!/bin/sh\nexit 0\n", r"cannot be loaded: .*\.so"),
        ("#!/nonexistent\n", r"g\+\+ does not run: .*No such file"),
    ],
)
def test_a_compiler_that_does_not_work(source, tmp_path, monkeypatch, script, why):
    use_compiler(tmp_path, monkeypatch, script)
    with pytest.raises(KernelsUnavailable, match=why):
        load_library([source], {})


def test_a_library_that_lacks_something(source, monkeypatch):
    """As where torch has another OpenMP than GCC's."""
    source.write_text('extern "C" int missing(); extern "C" int answer() { return missing(); }')
    with pytest.raises(KernelsUnavailable, match=r"cannot be loaded: .*undefined symbol: missing"):
        load_library([source], {})


def test_threads_are_those_of_torch(source):
    """OpenMP's runtime is the one that torch has loaded, so there is one set of threads, as large as torch says."""
    source.write_text('#include <omp.h>\nextern "C" int answer() { return omp_get_max_threads(); }')
    threads = torch.get_num_threads()
    library = load_library([source], {})
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            assert library.answer() == number
    finally:
        torch.set_num_threads(threads)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert len({line.split()[-1] for line in maps.splitlines() if "libgomp" in line}) == 1


def test_the_compiler_gets_no_keys(source, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIOENGINE_API_KEY", "secret")
    seen = tmp_path / "seen"
    use_compiler(tmp_path, monkeypatch, f'#!/bin/sh\nenv >> {seen}\nexec {shutil.which("g++")} "$@"\n')
    load_library([source], {"ANSWER": 1})
    assert "LC_ALL=C" in seen.read_text()
    assert "secret" not in seen.read_text()


def test_a_kept_library_without_a_function(source, home, tmp_path, monkeypatch, compilations):
    """It is compiled again in its place. (In another home: this process has the first one open.)"""
    load_library([source], {"ANSWER": 8}, ("answer",))
    (sound,) = home.iterdir()
    other = tmp_path / "other.cpp"
    other.write_text('extern "C" int another() { return 0; }')
    load_library([other], {}, ("another",))
    (lacking,) = set(home.iterdir()) - {sound}
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "another"))
    kept = tmp_path / "another" / "kernels" / sound.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(lacking.read_bytes())
    assert load_library([source], {"ANSWER": 8}, ("answer",)).answer() == 8
    assert kept.read_bytes() == sound.read_bytes()
    assert compilations() == 3


def test_a_source_without_a_function(source):
    with pytest.raises(KernelsUnavailable, match="lacks the function missing"):
        load_library([source], {"ANSWER": 1}, ("answer", "missing"))


# ---- several sources -----------------------------------------------------------------------------------------------


@pytest.fixture
def other(source):
    """A second source, which the first one calls."""
    source.write_text('extern "C" int other(); extern "C" int answer() { return other() + ANSWER; }')
    path = source.with_name("other.cpp")
    path.write_text('extern "C" int other() { return 40; }')
    return path


def test_two_sources(source, other, home, compilations):
    for _ in range(2):
        assert load_library([source, other], {"ANSWER": 2}).answer() == 42
    assert compilations() == 2
    other.write_text('extern "C" int other() { return 50; }')
    assert load_library([source, other], {"ANSWER": 2}).answer() == 52
    assert compilations() == 4
    assert len(list(home.iterdir())) == 2


def test_two_sources_are_compiled_side_by_side(source, other, tmp_path, monkeypatch):
    """Each compiler waits for the other one."""
    met = tmp_path / "met"
    met.mkdir()
    meet = f'touch {met}/$$; until [ "$(ls {met} | wc -l)" = 2 ]; do sleep 0.01; done'
    use_compiler(tmp_path, monkeypatch, WHEN_COMPILING.format(do=meet, compiler=shutil.which("g++")))
    assert load_library([source, other], {"ANSWER": 2}).answer() == 42


def hang(tmp_path, monkeypatch, which):
    """Compile no source whose path matches; return a function that gives the process that would have compiled it."""
    pid = tmp_path / "pid"
    do = f'case "$*" in {which}) sleep 60 & echo $! > {pid}; wait;; *) until [ -s {pid} ]; do sleep 0.01; done;; esac'
    use_compiler(tmp_path, monkeypatch, WHEN_COMPILING.format(do=do, compiler=shutil.which("g++")))
    return lambda: int(pid.read_text())


@pytest.mark.parametrize("hanging", ["source", "other"])
def test_one_of_two_sources_is_wrong(source, other, home, tmp_path, monkeypatch, hanging):
    """The compiler of the other one is ended, with its child."""
    wrong = {"source": other, "other": source}[hanging]
    wrong.write_text("int x = y;")
    child = hang(tmp_path, monkeypatch, f"*{hanging}.cpp*")
    with pytest.raises(KernelsUnavailable, match=rf"g\+\+ fails: .*{wrong.name}:1:9: error: .*y.* was not declared"):
        load_library([source, other], {"ANSWER": 2})
    assert has_ended(child())
    assert not home.exists()


def test_compilers_that_take_too_long(source, other, home, tmp_path, monkeypatch):
    monkeypatch.setattr("trioengine.worker.compiler._TIMEOUT", 1.0)
    child = hang(tmp_path, monkeypatch, "*other.cpp*")
    with pytest.raises(KernelsUnavailable, match=r"g\+\+ takes longer than 1 s"):
        load_library([source, other], {"ANSWER": 2})
    assert has_ended(child())
    assert not home.exists()


def has_ended(pid):
    """Or will at once. Its parent was killed, too, so that it may be a zombie."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


# ---- the runner ----------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_kernels_are_those_of_torch(path, prompt, monkeypatch, capfd):
    expected = generate(load(path), [prompt], 8)
    monkeypatch.setenv("PATH", "")
    runner = load(path)
    assert runner.info.kernels == "torch"
    assert generate(runner, [prompt], 8) == expected
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ModelError, match=r"no native kernels: no C\+\+ compiler found; .*choose kernels auto or torch"):
        load(path, kernels="native")


def test_a_compiler_that_fails_is_told(path, tmp_path, monkeypatch, capfd):
    use_compiler(tmp_path, monkeypatch, "#!/bin/sh\necho 'error: no space left' >&2\nexit 1\n")
    assert load(path).info.kernels == "torch"
    assert "trioengine: no native kernels, torch's are slower: " in capfd.readouterr().err


def test_a_library_lives_on_without_its_file(source, home):
    library = load_library([source], {"ANSWER": 5})
    for path in home.iterdir():
        path.unlink()
    assert isinstance(library, ctypes.CDLL)
    assert library.answer() == 5
