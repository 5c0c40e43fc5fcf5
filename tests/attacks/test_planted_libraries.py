"""Compiled kernels that another user of the machine has planted, or could have: they are never loaded."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from trioengine.worker.compiler import find_compiler, load_library

SOURCE = 'extern "C" int answer() { return ANSWER; }'
PLANTED = 'extern "C" int answer() { return 666; }'


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """The folder of compiled kernels, two folders deep."""
    if find_compiler() is None and os.environ.get("CI") != "true":
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "cache" / "home"))
    return tmp_path / "cache" / "home" / "kernels"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.cpp"
    path.write_text(SOURCE)
    return path


def plant(source, kernels, answer):
    """Put another library in the place of the one that is kept for `answer`, under a name not loaded before."""
    load_library([source], {"ANSWER": answer})
    (kept,) = kernels.iterdir()
    evil = source.with_name("evil.cpp")
    evil.write_text(PLANTED)
    load_library([evil], {})
    (planted,) = [path for path in kernels.iterdir() if path != kept]
    home = kernels.parents[1]
    moved = home.rename(home.with_name("moved"))  # the loader knows the first one by its path
    planted, kept = (moved / path.relative_to(home) for path in (planted, kept))
    planted.replace(kept)
    os.environ["TRIOENGINE_HOME"] = str(moved / "home")
    return kept


def test_the_plant_works(source, kernels):
    """Without an attacker's marks it is loaded, so that the other tests show what they seem to."""
    plant(source, kernels, 1)
    assert load_library([source], {"ANSWER": 1}).answer() == 666


@pytest.mark.parametrize("bits", [stat.S_IWGRP, stat.S_IWOTH, stat.S_IWGRP | stat.S_IWOTH | stat.S_ISVTX])
@pytest.mark.parametrize("depth", [0, 1, 2, 3], ids=["the file", "its folder", "the home", "a folder above"])
def test_writable_by_others(source, kernels, bits, depth):
    """Compiled anew, and the planted file is left alone; only a folder above may be writable, where it is sticky."""
    kept = plant(source, kernels, 2)
    place = (kept, *kept.parents)[depth]
    content = kept.read_bytes()
    place.chmod(stat.S_IMODE(place.stat().st_mode) | bits)
    is_sticky = bits & stat.S_ISVTX and depth > 0
    assert load_library([source], {"ANSWER": 2}).answer() == (666 if is_sticky else 2)
    assert (kept.read_bytes() == content) == (depth > 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("depth", [0, 1, 2, 3], ids=["the file", "its folder", "the home", "a folder above"])
def test_owned_by_another(source, kernels, depth):
    kept = plant(source, kernels, 3)
    os.chown((kept, *kept.parents)[depth], 12345, 12345)
    assert load_library([source], {"ANSWER": 3}).answer() == 3


def test_a_link_to_a_place_of_others(source, kernels, tmp_path, monkeypatch):
    """The folders that count are those that the file lies in."""
    kept = plant(source, kernels, 4)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    shutil.move(kept.parents[1], open_to_all / "home")
    (tmp_path / "link").symlink_to(open_to_all / "home")
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "link"))
    assert load_library([source], {"ANSWER": 4}).answer() == 4


def test_a_link_in_the_place_of_the_library(source, kernels, tmp_path):
    kept = plant(source, kernels, 5)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    kept.rename(open_to_all / kept.name)
    kept.symlink_to(open_to_all / kept.name)
    assert load_library([source], {"ANSWER": 5}).answer() == 5


def test_a_place_for_temporary_files_that_others_can_change(source, tmp_path, monkeypatch):
    """Compiled in a folder for this process alone, of which nothing is left, and whatever its path is made to mean."""
    monkeypatch.setenv("TRIOENGINE_HOME", "/dev/null/nothing")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    temporary.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    log = tmp_path / "modes"
    directory = tmp_path / "bin"
    directory.mkdir()
    ours = f"{temporary}/trioengine-*"
    swap = f"stat -c %a {ours} >> {log}; mv {ours} {temporary}/away; mkdir {temporary}/x"
    script = f'#!/bin/sh\ncase "$*" in *" -c "*) {swap};; esac\nexec {shutil.which("g++")} "$@"\n'
    (directory / "g++").write_text(script)
    (directory / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    assert load_library([source], {"ANSWER": 6}).answer() == 6
    assert log.read_text() == "700\n"


def test_what_is_kept_can_be_loaded_again_with_a_generous_umask(source, kernels):
    before = os.umask(0)
    try:
        kernels.parents[1].mkdir(mode=0o755)
        kernels.parent.mkdir(mode=0o755)
        assert load_library([source], {"ANSWER": 7}).answer() == 7
    finally:
        os.umask(before)
    (kept,) = kernels.iterdir()
    assert stat.S_IMODE(Path(kept).stat().st_mode) & 0o022 == 0
    assert stat.S_IMODE(kernels.stat().st_mode) == 0o700
