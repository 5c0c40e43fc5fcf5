"""Kernels that are compiled in a thread, while the worker imports torch."""

import dataclasses
import os
import shutil
import threading

import pytest
from helpers import tiny_decoders
from helpers.compilers import WHEN_COMPILING, count_compilations, own_home, use_compiler, write_source

from trioengine.core.config import WorkerConfig
from trioengine.worker.compiler import KernelsUnavailable, compile_library, load_library
from trioengine.worker.native_library import SOURCES, compiling_ahead
from trioengine.worker.runner.model_runner import TorchModelRunner


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    return own_home(tmp_path, monkeypatch)


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path)


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    return count_compilations(tmp_path, monkeypatch)


def test_a_library_that_was_compiled_ahead_is_loaded(source, compilations):
    compile_library([source], {"ANSWER": 9})
    compile_library([source], {"ANSWER": 9})
    assert load_library([source], {"ANSWER": 9}).answer() == 9
    assert compilations() == 1


def test_loading_waits_for_the_compilation(source, tmp_path, monkeypatch):
    """One at a time, so that it is compiled once."""
    entered, proceed, log = (tmp_path / name for name in ("entered", "proceed", "log"))
    os.mkfifo(entered)
    os.mkfifo(proceed)
    do = f"echo >> {log}; echo > {entered}; cat {proceed}"
    use_compiler(tmp_path, monkeypatch, WHEN_COMPILING.format(do=do, compiler=shutil.which("g++")))
    ahead = threading.Thread(target=compile_library, args=([source], {"ANSWER": 9}))
    ahead.start()
    answers = []
    loading = threading.Thread(target=lambda: answers.append(load_library([source], {"ANSWER": 9}).answer()))
    entered.read_text()  # the compiler runs
    loading.start()
    proceed.write_text("")
    loading.join()
    ahead.join()
    assert answers == [9]
    assert len(log.read_text().splitlines()) == 1


def test_a_failure_ahead_is_raised_once_more(source, compilations):
    source.write_text("int x = y;")
    for attempt in (compile_library, load_library):
        with pytest.raises(KernelsUnavailable, match="was not declared"):
            attempt([source], {})
    assert compilations() == 1
    with pytest.raises(KernelsUnavailable, match="was not declared"):
        load_library([source], {})
    assert compilations() == 2


def test_a_compiler_that_always_fails_is_waited_for_once(source, tmp_path, monkeypatch):
    log = tmp_path / "log"
    use_compiler(tmp_path, monkeypatch, f"#!/bin/sh\necho >> {log}\necho 'error: no space left' >&2\nexit 1\n")
    for attempt in (compile_library, load_library):
        with pytest.raises(KernelsUnavailable, match="no space left"):
            attempt([source], {})
    assert len(log.read_text().splitlines()) == 1


def test_an_error_beside_the_compilation_ends_it(path, tmp_path, home, monkeypatch):
    entered = tmp_path / "entered"
    os.mkfifo(entered)
    do = f'case "$*" in *native.cpp*) sleep 1000 & echo > {entered}; wait;; *) exec sleep 1000;; esac'
    use_compiler(tmp_path, monkeypatch, WHEN_COMPILING.format(do=do, compiler=shutil.which("g++")))
    with pytest.raises(ZeroDivisionError), compiling_ahead(WorkerConfig(str(path), device="cpu")):
        entered.read_text()  # the compiler runs
        raise ZeroDivisionError
    assert not list(home.iterdir())


def test_nothing_is_compiled_ahead_that_cannot_be_kept(source, tmp_path, monkeypatch, compilations):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRIOENGINE_HOME", str(tmp_path / "file"))
    compile_library([source], {"ANSWER": 3})
    assert load_library([source], {"ANSWER": 3}).answer() == 3
    assert compilations() == 1


def test_the_home_of_another_user_is_none_for_us(source, home, monkeypatch, compilations):
    home.mkdir(parents=True)
    home.chmod(0o777)
    compile_library([source], {"ANSWER": 3})
    assert not list(home.iterdir())
    assert load_library([source], {"ANSWER": 3}).answer() == 3
    assert compilations() == 1


CONFIGURATIONS = [
    ("llama", {}),
    ("llama", {"dtype": "bfloat16", "block_size": 32}),
    ("llama", {"dtype": "float32", "kv_cache_dtype": "int8"}),
    ("lfm2", {}),
    ("qwen3-moe", {}),
    ("qwen3_5-moe", {}),
]


@pytest.mark.parametrize(("variant", "changes"), CONFIGURATIONS)
def test_the_library_that_is_compiled_ahead_is_the_one_that_the_model_loads(
    path, tmp_path, compilations, variant, changes
):
    path = path if variant == "llama" else tiny_decoders.write(tmp_path / variant, variant)
    config = WorkerConfig(str(path), device="cpu", kv_cache_memory=64 << 20, **changes)
    with compiling_ahead(config):
        pass
    assert compilations() == len(SOURCES)
    assert TorchModelRunner.load(config, lambda done, total: None).info.kernels == "native"
    assert compilations() == len(SOURCES)


@pytest.mark.parametrize("changes", [{"kernels": "torch"}, {"device": "cuda"}, {"model_path": "/nowhere"}])
def test_nothing_is_compiled_ahead(path, home, changes):
    with compiling_ahead(dataclasses.replace(WorkerConfig(str(path)), **changes)):
        pass
    assert not home.exists()
