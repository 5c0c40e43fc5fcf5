"""The generated page is up to date, the examples run on the real model, and links have targets."""

import asyncio
import importlib.util
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from helpers.loopback import on_loopback
from helpers.pictures import PICTURE

from trioengine import EngineConfig, blocking, connect, open_engine
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation, simulated_engine
from trioengine.testing.simulation import DEFAULT_LIMITS, IMAGE_LIMITS

DOCS = Path(__file__).parents[2] / "docs"


def examples(page):
    """Return the async functions defined by the python blocks of a page, by name; blocks marked `py` are not run."""
    functions = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        namespace = {}
        exec(compile(block, page, "exec"), namespace)
        functions |= {name: value for name, value in namespace.items() if asyncio.iscoroutinefunction(value)}
    return functions


def test_the_lifecycle_page_matches_the_tables():
    spec = importlib.util.spec_from_file_location("make_lifecycle", DOCS / "make_lifecycle.py")
    make_lifecycle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_lifecycle)
    assert (DOCS / "lifecycle.md").read_text() == make_lifecycle.page(), "run python docs/make_lifecycle.py"


@pytest.fixture
def config(smollm2):
    return EngineConfig(model=str(smollm2), kv_cache_memory=64 << 20, max_model_len=1024)


async def test_the_embedding_examples_run(config):
    functions = examples("embedding.md")
    for name in ("test_my_program", "search", "adapted"):  # which have tests of their own
        del functions[name]
    assert len(functions) == 15
    async with open_engine(config) as engine:
        for function in functions.values():
            with trio.fail_after(120):
                await function(engine)
        await engine.check_invariants()


async def test_the_example_of_embeddings_runs(autojump_clock):
    async with simulated_engine(limits=replace(DEFAULT_LIMITS, embeds=True)) as (engine, _):
        await examples("embedding.md")["search"](engine)


async def test_the_example_of_adapters_runs(autojump_clock):
    async with simulated_engine() as (engine, _):
        await examples("embedding.md")["adapted"](engine)
        assert not engine.adapters


async def test_an_example_for_an_engine_runs_with_a_client():
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery)
        run = partial(serve, EngineConfig(model="toy"), ServeConfig(port=0), ports=simulation.ports)
        server = await nursery.start(run)
        await server.engine.ready()
        async with connect(f"ws://127.0.0.1:{server.port}") as client:
            with trio.fail_after(120):
                await examples("embedding.md")["conversation"](client)
        server.abort()


async def test_the_examples_with_images_run(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(PICTURE)
    functions = examples("images.md")
    async with on_loopback(limits=IMAGE_LIMITS) as server:
        url = f"http://127.0.0.1:{server.port}"
        with trio.fail_after(120):
            await functions.pop("embedded")(server.engine, path)
            await functions.pop("many_questions")(server.engine, path)
            history = await functions.pop("remote")(url, path)
            await functions.pop("with_openai")(url + "/v1", path, "toy")
            async with connect(url) as client, client.open_session(history=history) as session:
                assert (await session.ask("So?", max_tokens=5)).usage.prompt_tokens > 100
    assert len(history) == 4 and functions == {}


def test_images_without_trio(tmp_path):
    """The client for code without trio passes its images on."""

    async def serve_and_ask():
        async with on_loopback(limits=IMAGE_LIMITS) as server:
            return await trio.to_thread.run_sync(ask, f"http://127.0.0.1:{server.port}")

    def ask(url):
        with blocking.connect(url) as client, client.open_session() as session:
            options = {"media": [PICTURE], "max_tokens": 5, "temperature": 0}
            whole = client.generate("What?", **options).text
            return whole, "".join(chunk.text for chunk in session.generate("What?", **options))

    whole, streamed = trio.run(serve_and_ask)
    assert whole == streamed


async def test_the_example_of_a_test_passes(autojump_clock):
    await examples("embedding.md")["test_my_program"](autojump_clock)


def test_the_asyncio_example_runs(config):
    (function,) = (value for name, value in examples("asyncio.md").items() if name == "ask_from_asyncio")
    completion = asyncio.run(function(config, "Name the capital of France."))
    assert "Paris" in completion.text


def children():
    """Return the ids of this process's children."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("wait_for_the_worker", [False, True])
def test_the_asyncio_example_is_cancelled(config, wait_for_the_worker):
    """At any stage, and several times; afterwards trio has ended, and the worker with it."""
    ask_from_asyncio = examples("asyncio.md")["ask_from_asyncio"]
    before = children()
    complaints = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        task = asyncio.create_task(ask_from_asyncio(config, "Name the capital of France."))
        await asyncio.sleep(0)
        while wait_for_the_worker and children() == before:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert children() == before
        with pytest.raises(RuntimeError):  # no trio is running
            trio.lowlevel.current_trio_token()

    asyncio.run(asyncio.wait_for(main(), 120))
    assert complaints == []


def test_the_asyncio_example_is_cancelled_when_trio_has_ended(monkeypatch):
    """The caller is cancelled in the step in which trio ends."""
    ask_from_asyncio = examples("asyncio.md")["ask_from_asyncio"]
    start_guest_run = trio.lowlevel.start_guest_run

    async def main():
        def start(*args, done_callback, **options):
            def end(outcome):
                done_callback(outcome)
                task.cancel()

            start_guest_run(*args, done_callback=end, **options)

        monkeypatch.setattr(trio.lowlevel, "start_guest_run", start)
        task = asyncio.create_task(ask_from_asyncio(EngineConfig(model="/no/such/model.gguf"), "x"))
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 120))


PAGES = ["../README.md", *sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))]


def anchors(path):
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_have_targets(page):
    path = DOCS / page
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        linked = path.parent / target if target else path
        assert linked.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(linked), f"{page}: {target}#{anchor}"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "comparison.md"])
def test_files_that_pages_name_exist(page):
    """Comparison.md names files of other projects."""
    root = DOCS.parent
    files = {
        f"/{path.relative_to(root)}"
        for folder in ("trioengine", "tests", "docs")
        for path in (root / folder).rglob("*")
    }
    prose = re.sub(r"```.*?```", "", (DOCS / page).read_text(), flags=re.DOTALL)
    named = set(re.findall(r"`([\w/-]+\.(?:py|cpp|mjs|ts))`", prose)) - {"vllm_offline.py", "llama.cpp"}
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in files)} == set()
