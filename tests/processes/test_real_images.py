"""Images through real processes: right answers, and not a descriptor or a memfd left, whatever is killed."""

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import trio
from helpers.tiny_smolvlm import CASES, QUESTION, VARIANTS, picture, write
from PIL import Image

from trioengine import EngineConfig, RequestRejected, SamplingParams, open_engine

DATA = Path(__file__).parent.parent / "data"
REFERENCE = json.loads((DATA / "vision_reference.json").read_text())
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PATIENCE = 300  # seconds; a guard against hanging, far beyond what is needed
ORPHAN_PATIENCE = 60  # for what takes milliseconds


@pytest.fixture
async def in_time():
    with trio.fail_after(PATIENCE):
        yield


def checkpoint(directory, variant="split", device="cpu"):
    return EngineConfig(
        model=str(write(directory / variant, variant)),
        device=device,
        dtype="float32",
        max_model_len=1024,
        kv_cache_memory=64 << 20,
        restart_delays=(0.0,),
    )


def pictures(name):
    return [Image.frombytes("RGB", size, picture(*size)) for size in CASES[name]]


def descriptors():
    return [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]


def memfds(pid="self"):
    links = (path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink())
    return [str(link) for link in links if "memfd:trioengine" in str(link)]


@pytest.mark.parametrize("variant", VARIANTS)
async def test_answers_are_those_of_the_reference(in_time, tmp_path, device, variant):
    """Over a memfd and a socket, decoded beside the steps, tile by tile."""
    async with open_engine(checkpoint(tmp_path, variant, device)) as engine:
        for name, case in REFERENCE[variant].items():
            completion = await engine.generate(QUESTION, GREEDY, media=pictures(name))
            assert list(completion.token_ids) == case["output"], name
            assert completion.usage.prompt_tokens == len(case["input_ids"])
        await engine.check_invariants()
        assert not memfds() and not memfds(engine.statistics().worker_pid)


async def test_all_at_once_they_are_the_same(in_time, tmp_path, device):
    answers = {}

    async def ask(engine, name, number):
        answers[name, number] = await engine.generate(QUESTION, GREEDY, media=pictures(name))

    async with open_engine(checkpoint(tmp_path, device=device)) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                for name in CASES:
                    nursery.start_soon(ask, engine, name, number)
        await engine.check_invariants()
    for (name, _), completion in answers.items():
        assert list(completion.token_ids) == REFERENCE["split"][name]["output"]


async def test_a_killed_worker_leaves_nothing_and_the_answer_goes_on(in_time, tmp_path, device):
    async with open_engine(checkpoint(tmp_path, device=device)) as engine:
        before = None
        for moment in range(6):
            async with engine.open_session() as session:
                async with session.generate(QUESTION, GREEDY, media=pictures("two"), wait=True) as generation:
                    for _ in range(moment):
                        await anext(generation, None)  # a chunk may have several tokens
                    killed = engine.statistics().worker_pid
                    os.kill(killed, signal.SIGKILL)
                    completion = await generation.result()
                assert list(completion.token_ids) == REFERENCE["split"]["two"]["output"]
            while engine.statistics().worker_pid == killed:  # the answer may have been complete before its death
                await engine.runtime.gate.changed()
            await engine.ready()
            await engine.check_invariants()
            assert not memfds()
            before = before or len(descriptors())
            assert len(descriptors()) == before
    assert not memfds()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(17), "checksum"),
        (lambda data: data[: len(data) // 2], "the PNG image is truncated or damaged"),
        (lambda data: data[:60] + bytes(40) + data[100:], "the PNG image is truncated or damaged"),
    ],
)
async def test_a_damaged_image_fails_alone(in_time, tmp_path, data, why):
    path = tmp_path / "picture.png"
    Image.frombytes("RGB", (45, 30), picture(45, 30)).save(path)
    damaged = data(path.read_bytes()) if callable(data) else data
    async with open_engine(checkpoint(tmp_path)) as engine, engine.open_session() as session:
        async with session.generate(QUESTION, GREEDY, media=pictures("one")) as generation:
            with pytest.raises(RequestRejected, match=why) as caught:
                await engine.generate(QUESTION, GREEDY, media=[damaged])
            assert str(caught.value).startswith("media[0]: ")
            assert list((await generation.result()).token_ids) == REFERENCE["split"]["one"]["output"]
        assert await engine.generate(QUESTION, GREEDY, media=[path])
        await engine.check_invariants()


PARENT = """
import sys, trio
sys.path.insert(0, {tests!r})
from PIL import Image
from helpers.tiny_smolvlm import picture
from trioengine import open_engine

async def main():
    async with open_engine({model!r}, kv_cache_memory=64 << 20, max_model_len=1024) as engine:
        print(engine.statistics().worker_pid, flush=True)
        image = Image.frombytes("RGB", (2000, 2000), picture(2000, 2000))
        async with engine.open_session() as session:
            async with session.generate("?", max_tokens=900, ignore_eos=True, media=[image] * 4) as generation:
                print("posted", flush=True)
                await generation.result()

trio.run(main)
"""


def test_a_killed_parent_leaves_nothing(tmp_path):
    """The worker, its descriptors and the memory of its payloads are gone with it."""
    model = checkpoint(tmp_path).model
    program = textwrap.dedent(PARENT.format(tests=str(DATA.parent), model=model))
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(parent.stdout.readline())
        pidfd = os.pidfd_open(worker)
        assert parent.stdout.readline() == "posted\n"
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    try:
        assert select.select([pidfd], [], [], ORPHAN_PATIENCE)[0], "the worker outlives its parent"
    finally:
        os.close(pidfd)
