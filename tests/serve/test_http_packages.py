"""Clients of others: the packages openai and httpx, unmodified, over a socket to a server that is simulated."""

import asyncio
import json
import re
import shutil
import struct
import subprocess
import threading
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import trio
from helpers.clients import first_token

from trioengine import EngineConfig
from trioengine.aio.concurrency import open_unwrapped_nursery
from trioengine.serve.chat_request import FIELDS
from trioengine.serve.config import ServeConfig
from trioengine.serve.startup import serve
from trioengine.testing import Simulation, toy_answer
from trioengine.testing.simulated_worker import Behaviour
from trioengine.testing.simulation import DEFAULT_LIMITS
from trioengine.testing.toy_model import toy_embedding
from trioengine.text.reasoning import REASONING_FORMS, ReasoningForm

MESSAGES = [{"role": "user", "content": "hello"}]
EXTRA = {"ignore_eos": True}
SHORT = {"model": "toy", "messages": MESSAGES, "temperature": 0, "max_tokens": 5, "extra_body": EXTRA}
LONG = SHORT | {"max_tokens": 400}
EMBEDDERS = replace(DEFAULT_LIMITS, embeds=True)


@asynccontextmanager
async def running(step_time=0.001, name="toy", limits=DEFAULT_LIMITS, **options):
    async with open_unwrapped_nursery() as nursery:
        simulation = Simulation(nursery, limits=limits, behaviours=[Behaviour(load_time=0, step_time=step_time)])
        config = EngineConfig(model="toy", max_num_seqs=8)
        run = partial(serve, config, ServeConfig(port=0, served_model_name=name, **options), ports=simulation.ports)
        server = await nursery.start(run)
        await server.engine.ready()
        yield server
        while server.engine.statistics().sessions:
            await server.engine.runtime.gate.changed()
        await server.engine.check_invariants()
        server.abort()


def expected(server, max_tokens):
    tokenizer = server.engine.tokenizer
    return tokenizer.decode(toy_answer(tokenizer.apply_chat_template(MESSAGES), max_tokens, ignore_eos=True))


def base_url(server):
    return f"http://127.0.0.1:{server.port}/v1"


async def in_thread(function, server):
    """Call it with an OpenAI client; the thread is waited for."""

    def call():
        with openai.OpenAI(base_url=base_url(server), api_key="none", max_retries=0) as client:
            return function(client)

    return await trio.to_thread.run_sync(call)


async def under_asyncio(function, server):
    async def call():
        async with openai.AsyncOpenAI(base_url=base_url(server), api_key="none", max_retries=0) as client:
            return await function(client)

    return await trio.to_thread.run_sync(asyncio.run, call())


async def test_openai():
    def ask(client):
        assert client.models.list().data[0].id == client.models.retrieve("toy").id == "toy"
        return client.chat.completions.create(**SHORT, n=1, user="me", logprobs=True, top_logprobs=2)

    async with running() as server:
        completion = await in_thread(ask, server)
        assert completion.choices[0].message.content == expected(server, 5)
        assert completion.choices[0].finish_reason == "length"
        assert completion.usage.completion_tokens == 5
        assert len(completion.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_openai_streaming():
    def ask(client):
        with client.chat.completions.create(**SHORT, stream=True, stream_options={"include_usage": True}) as stream:
            return list(stream)

    async with running() as server:
        *chunks, usage = await in_thread(ask, server)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(server, 5)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert (usage.choices, usage.usage.completion_tokens) == ([], 5)


async def test_openai_completes_prompts():
    prompts = ["to be", "or not"]

    def ask(client):
        fields = {"model": "toy", "prompt": prompts, "temperature": 0, "max_tokens": 5, "extra_body": EXTRA}
        whole = client.completions.create(**fields)
        texts = ["", ""]
        for event in client.completions.create(stream=True, **fields):
            for choice in event.choices:
                texts[choice.index] += choice.text
        return whole, texts

    async with running() as server:
        whole, texts = await in_thread(ask, server)
        tokenizer = server.engine.tokenizer
        expected = [tokenizer.decode(toy_answer(tokenizer.encode(each), 5, ignore_eos=True)) for each in prompts]
        assert [choice.text for choice in whole.choices] == texts == expected
        assert whole.usage.completion_tokens == 10


async def test_openai_scores_prompts():
    def ask(client):
        fields = {"model": "toy", "prompt": "to be", "temperature": 0, "max_tokens": 2, "extra_body": EXTRA}
        pieces = [event.choices[0] for event in client.completions.create(stream=True, echo=True, logprobs=2, **fields)]
        return client.completions.create(echo=True, logprobs=2, **fields).choices[0], pieces

    async with running() as server:
        whole, pieces = await in_thread(ask, server)
        ids = server.engine.tokenizer.encode("to be")
        answer = toy_answer(ids, 2, ignore_eos=True)
        text = "to be" + server.engine.tokenizer.decode(answer)
        assert whole.text == "".join(piece.text for piece in pieces) == text
        assert whole.logprobs.token_logprobs == [None, *(-0.5 for _ in [*ids[1:], *answer])]
        assert [len(top) for top in whole.logprobs.top_logprobs[1:5]] == [2] * 4
        assert whole.logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
        lists = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        assert [token for each in lists for token in each.tokens] == whole.logprobs.tokens


async def test_openai_has_several_choices():
    def ask(client):
        fields = {"model": "toy", "n": 3, "seed": 5, "max_tokens": 5, "extra_body": EXTRA}
        chat, prompt = client.chat.completions.create, client.completions.create
        whole = [choice.message.content for choice in chat(messages=MESSAGES, **fields).choices]
        texts = ["", "", ""]
        for event in chat(messages=MESSAGES, stream=True, **fields):
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == whole
        whole = [choice.text for choice in prompt(prompt=["to be", "or not"], **fields).choices]
        texts = [""] * 6
        for event in prompt(prompt=["to be", "or not"], stream=True, **fields):
            for choice in event.choices:
                texts[choice.index] += choice.text
        assert texts == whole
        return whole

    async with running() as server:
        assert len(await in_thread(ask, server)) == 6


async def test_openai_accumulates_a_stream():
    """Its own helper, which is strict about what comes in which order."""

    def ask(client):
        fields = {"model": "toy", "messages": MESSAGES, "temperature": 0}
        with client.chat.completions.stream(**fields) as stream:
            return client.chat.completions.create(**fields), stream.get_final_completion()

    async with running() as server:
        whole, streamed = await in_thread(ask, server)
        assert streamed.choices[0].message.content == whole.choices[0].message.content
        assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


async def test_openai_answers_come_back_as_history():
    def ask(client):
        answer = client.chat.completions.create(**SHORT).choices[0].message
        again = {"role": "user", "content": "again"}
        for turn in (answer, answer.to_dict(), {"role": "assistant", "content": answer.content}):
            client.chat.completions.create(**SHORT | {"messages": [*MESSAGES, turn, again]})
        return True

    async with running() as server:
        assert await in_thread(ask, server)


async def test_openai_async():
    async def ask(client):
        whole = await client.chat.completions.create(**SHORT)
        stream = await client.chat.completions.create(**SHORT, stream=True)
        return whole, [chunk async for chunk in stream]

    async with running() as server:
        whole, chunks = await under_asyncio(ask, server)
        assert whole.choices[0].message.content == expected(server, 5)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected(server, 5)


async def test_openai_leaves_a_stream():
    async def ask(client):
        async with await client.chat.completions.create(**LONG, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    return

    async with running(step_time=0.05) as server:
        await under_asyncio(ask, server)
        while server.engine.statistics().sessions:
            await server.engine.runtime.gate.changed()
        assert server.engine.statistics().aborted == 1


async def test_openai_is_cancelled_while_it_waits():
    runs = threading.Event()

    async def ask(client):
        task = asyncio.create_task(client.chat.completions.create(**LONG))
        await asyncio.to_thread(runs.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async with running(step_time=0.05) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(under_asyncio, ask, server)
            await first_token(server.engine)
            runs.set()
        while server.engine.statistics().sessions:
            await server.engine.runtime.gate.changed()
        assert server.engine.statistics().aborted == 1


ERRORS = [
    ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
    ({"n": 17}, openai.BadRequestError, "invalid_value", "n"),
    ({"messages": []}, openai.BadRequestError, "invalid_value", "messages"),
    ({"temperature": -1}, openai.BadRequestError, "invalid_value", "temperature"),
    ({"extra_body": {"best_of": 2}}, openai.BadRequestError, "unsupported_parameter", "best_of"),
]


async def test_openai_errors():
    def ask(client):
        for fields, error, code, param in ERRORS:
            for stream in (False, True):
                with pytest.raises(error) as caught:
                    client.chat.completions.create(**SHORT | fields, stream=stream)
                assert (caught.value.code, caught.value.param) == (code, param)
        return True

    async with running() as server:
        assert await in_thread(ask, server)


async def test_openai_hears_of_an_error_in_a_stream():
    def ask(client):
        with client.chat.completions.create(**LONG, stream=True) as stream:
            client.post("/../abort_request", body={"abort_all": True}, cast_to=object)
            with pytest.raises(openai.APIError) as caught:
                list(stream)
        return caught.value

    async with running(step_time=0.05) as server:
        error = await in_thread(ask, server)
        assert (error.code, error.type) == ("abort_all", "server_error")


async def test_openai_waits_and_asks_again_when_the_server_is_full():
    """By its own rules, from Retry-After."""

    def ask(client):
        return client.with_options(max_retries=5).chat.completions.with_raw_response.create(**SHORT)

    async with running() as server:
        gate = server.engine.runtime.gate
        slots, gate._request_slots = gate._request_slots, (0, "no slots")

        async def make_room():
            while not server.engine.statistics().rejected:
                await gate.changed()
            gate._request_slots = slots

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make_room)
            response = await in_thread(ask, server)
        assert response.retries_taken >= 1


async def test_httpx_under_trio():
    body = {key: value for key, value in SHORT.items() if key != "extra_body"} | EXTRA
    async with running() as server:
        async with httpx.AsyncClient(base_url=base_url(server)) as client:
            for stream in (False, True, False):
                response = await client.post("/chat/completions", json=body | {"stream": stream})
                assert response.status_code == 200
            assert response.json()["choices"][0]["message"]["content"] == expected(server, 5)
            async with client.stream("POST", "/chat/completions", json=body | {"stream": True}) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            assert (await client.get("/nothing")).status_code == 404


async def test_httpx_leaves_a_stream():
    body = {key: value for key, value in LONG.items() if key != "extra_body"} | EXTRA | {"stream": True}
    async with running(step_time=0.05) as server:
        async with httpx.AsyncClient(base_url=base_url(server)) as client:
            async with client.stream("POST", "/chat/completions", json=body) as response:
                assert response.status_code == 200  # comes with the first token
        while server.engine.statistics().sessions:
            await server.engine.runtime.gate.changed()
        assert server.engine.statistics().aborted == 1


PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def blocks(language, server):
    """The page's examples, for this server."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return [block.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}") for block in found]


async def test_the_python_examples_run(capsys):
    for name, limits, word in (
        ("smollm2-135m-instruct", DEFAULT_LIMITS, "chat.completions"),
        ("qwen3-embedding-0.6b", EMBEDDERS, "embeddings"),
    ):
        async with running(name=name, limits=limits) as server:
            for block in blocks("python", server):
                if word in block:
                    await trio.to_thread.run_sync(exec, compile(block, "http.md", "exec"), {})
                    assert capsys.readouterr().out
            assert server.engine.statistics().finished == 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_the_curl_examples_run():
    async with running(name="smollm2-135m-instruct") as server:
        answers = []
        for command in "".join(blocks("sh", server)).replace("curl ", "\0curl -s ").split("\0")[1:]:
            command = command.replace("19556", "104")  # a token that the toy model has
            process = await trio.run_process(["sh", "-c", command], capture_stdout=True, stderr=subprocess.DEVNULL)
            answers.append(json.loads(process.stdout))
        completion, text, messages, prompt, invariants, *aborted, slept, asleep, woken, updated = answers
        assert completion["object"] == "chat.completion"
        assert text["count"] == len("Hello") < messages["count"]
        assert prompt == {"prompt": "h"}
        assert (slept["is_sleeping"], woken["power"]) == (True, "awake")
        assert slept == asleep
        assert updated["error"]["code"] == "no_weights_dir"  # this server was started without
        assert (invariants["ok"], aborted) == (True, [{"aborted": 0}] * 3)


async def test_the_page_names_every_route_and_field():
    async with running() as server:
        names = {path.removesuffix("*") for path in server.connections._routes} - {"/", "/metrics"} | FIELDS
    for name in names:
        assert f"`{name}" in PAGE or f" {name}" in PAGE, name


async def test_reasoning_in_openai_s_client(monkeypatch):
    """The toy's prompts end with this first tag, and its answers never have the last one."""
    monkeypatch.setitem(REASONING_FORMS, "qwen3", ReasoningForm("assistant", "</think>"))

    def ask(client):
        message = client.chat.completions.create(**SHORT).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**SHORT, stream=True)]
        return message, "".join(getattr(delta, "reasoning_content", "") for delta in deltas)

    async with running(reasoning_parser="qwen3") as server:
        message, streamed = await in_thread(ask, server)
        assert message.content == "" and streamed == expected(server, 5)
        assert message.reasoning == message.reasoning_content == streamed


async def test_openai_embeddings():
    """The package asks for base64, and decodes it; asked for numbers, it gets the same ones."""
    texts = ["to be", "or not to be"]
    expected = [list(struct.unpack("<8f", toy_embedding(text.encode()))) for text in texts]

    def run(client):
        default = client.embeddings.create(model="toy", input=texts)
        numbers = client.embeddings.create(model="toy", input=texts, encoding_format="float")
        (short,) = client.embeddings.create(model="toy", input=[116, 111], dimensions=2).data
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="toy", input=["a", ""])
        return default, numbers, short, refused.value

    async with running(limits=EMBEDDERS) as server:
        default, numbers, short, refused = await in_thread(run, server)
    for found in (default, numbers):
        assert [entry.index for entry in found.data] == [0, 1]
        for entry, vector in zip(found.data, expected, strict=True):
            assert entry.embedding == pytest.approx(vector, abs=1e-8)
    assert (default.object, default.usage.prompt_tokens, default.usage.total_tokens) == ("list", 17, 17)
    assert len(short.embedding) == 2
    assert (refused.code, refused.param) == ("empty_prompt", "input[1]")
