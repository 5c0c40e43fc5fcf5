"""A type checker finds typos in a program that embeds the engine, and has nothing to say of a right one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from trioengine import ChatMessage, Engine, FinishReason, blocking, connect, open_engine
from trioengine.core.config import EngineConfig

message: ChatMessage = {"role": "user", "content": "x"}
bad_message: ChatMessage = {"role": "usr", "content": "x"}  # typo

async def right(engine: Engine) -> None:
    async with open_engine("toy", max_model_len=64, dtype="float32"), open_engine(EngineConfig(kernels="torch")):
        pass
    async with engine.open_session(wait=None, timeout=3) as session:
        async with session.generate("x", max_tokens=3, temperature=0, wait=False) as generation:
            completion = await generation.result()
        assert completion.finish_reason == "stop" or completion.finish_reason is FinishReason.LENGTH
        await session.ask([message], stop=["a"], timeout=3)
        await session.ask([1, 2, 3])
    await engine.generate("x", max_tokens=3)
    await engine.sleep(2, mode="keep")
    await engine.wake("kv_cache")
    await engine.wake(["kv_cache", "weights"])
    await engine.wake(engine.power.asleep)
    assert engine.state == "awake"
    async with connect("ws://localhost") as client, client.open_session() as remote:
        await remote.ask("x", max_tokens=3)
        await client.generate("x", max_tokens=3)

async def wrong(engine: Engine) -> None:
    open_engine("toy", max_model_length=64)  # typo
    open_engine("toy", dtype="float23")  # typo
    EngineConfig(kernels="tourch")  # typo
    EngineConfig(on_worker_loss="resme")  # typo
    async with engine.open_session() as session:
        session.generate("x", max_token=3)  # typo
        session.generate("x", max_tokens="3")  # typo
        await session.ask("x", temprature=0)  # typo
        await session.generate("x")  # typo
    await engine.generate("x", max_token=3)  # typo
    engine.abort(None)  # typo
    engine.open_session(labl="x")  # typo
    await engine.sleep(3)  # typo
    await engine.sleep(mode="abrt")  # typo
    await engine.update_weights("x", mode="keeep")  # typo
    await engine.wake("kv_cach")  # typo
    await engine.wake(["weigths"])  # typo
    async with connect("ws://localhost") as client, client.open_session() as remote:
        await remote.ask("x", max_token=3)  # typo
        await client.generate("x", max_token=3)  # typo

def right_blocking(engine: blocking.Engine) -> None:
    with engine.open_session(label="x", timeout=3) as session:
        for chunk in session.generate("x", max_tokens=3, temperature=0, wait=False, label="mine"):
            print(chunk.text)
        assert session.ask([message], stop=["a"], timeout=3).usage.completion_tokens > 0
        session.replace_history([])
    assert engine.generate("x", max_tokens=3).finish_reason == "stop"
    engine.sleep(2, mode="keep")
    engine.wake("kv_cache")
    assert engine.abort("mine") + engine.abort_all() == 0

def wrong_blocking(engine: blocking.Engine, client: blocking.Client) -> None:
    session = engine.open_session(labl="x")  # typo
    session.generate("x", max_token=3)  # typo
    session.generate("x", max_tokens="3")  # typo
    session.ask("x", temprature=0)  # typo
    session.ask("x").txt  # typo
    engine.generate("x", max_token=3)  # typo
    engine.sleep(mode="abrt")  # typo
    engine.wake("kv_cach")  # typo
    client.generate("x", max_token=3)  # typo
    client.sleep()  # typo
"""


def test_a_type_checker_finds_typos(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    options = ["--strict", "--no-error-summary", "--config-file", str(root / "pyproject.toml"), "--hide-error-context"]
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(root / ".mypy_cache"), str(program)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=root, check=False)
    lines = {int(line) for line in re.findall(r"program\.py:(\d+): error", found.stdout)}
    typos = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# typo")}
    assert lines == typos, found.stdout + found.stderr
