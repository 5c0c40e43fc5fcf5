"""The requests of `vllm bench serve`, for its backends `openai` and `openai-chat`, read as it reads their streams.

vLLM itself is too large to install. Its reader strips every piece that the network delivers, and takes the rest of its
buffer for an event as soon as it is JSON: an event need not end with its empty line.
"""

import asyncio
import json

import aiohttp
from report import BASE_URL, MODEL, report

PROMPT = "1, 2, 3, 4, 5, 6,"
OUTPUT_LEN = 24
IDS = [33, 28, 216, 34, 28, 216, 35, 28]  # of a random data set
COMMON = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}


def completion(prompt, **fields):
    """The body for `--backend openai`; fields that are not configured are null."""
    sampling = {"repetition_penalty": 1.0, "max_tokens": OUTPUT_LEN, "logprobs": None}
    return "/v1/completions", {"model": MODEL, "prompt": prompt, **sampling, **COMMON, **fields}


def chat(**fields):
    """The body for `--backend openai-chat`."""
    messages = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    sampling = {"max_completion_tokens": OUTPUT_LEN}
    return "/v1/chat/completions", {"model": MODEL, "messages": messages, **sampling, **COMMON, **fields}


class EventReader:
    """Splits a stream into the contents of its events."""

    def __init__(self):
        self._buffer = ""

    def feed(self, piece):
        self._buffer += piece.strip().decode()
        *events, self._buffer = self._buffer.split("\n\n")
        rest = self._buffer.removeprefix("data: ").strip()
        if self._buffer.startswith("data: ") and (rest == "[DONE]" or is_json(rest)):
            events.append(self._buffer)
            self._buffer = ""
        return [event.strip().removeprefix("data: ") for event in events if event.strip() and event[0] != ":"]


def is_json(text):
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


async def answer_to(session, path, body, headers):
    """Return the number of pieces with a choice, and the usage."""
    async with session.post(BASE_URL + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        reader, pieces, usage, contents = EventReader(), 0, None, []
        async for piece in response.content.iter_any():
            contents += reader.feed(piece)
        for content in contents:
            if content == "[DONE]":
                continue
            event = json.loads(content)
            if choices := event.get("choices"):
                assert "text" in choices[0] or "delta" in choices[0]
                pieces += 1
            elif event.get("usage"):
                usage = event["usage"]
        assert contents[-1] == "[DONE]"
        return pieces, usage


def benchmark(path, body, num_prompts=6):
    """Send the request several times at once, as a benchmark does."""

    async def send_all():
        connector = aiohttp.TCPConnector(limit=num_prompts)
        async with aiohttp.ClientSession(connector=connector, trust_env=True) as session:
            each = (
                answer_to(session, path, body, {"x-request-id": f"bench-{number}", "Authorization": "Bearer none"})
                for number in range(num_prompts)
            )
            return await asyncio.gather(*each)

    for pieces, usage in asyncio.run(send_all()):
        assert pieces > 1
        assert usage["completion_tokens"] == OUTPUT_LEN
        assert usage["prompt_tokens"] > 0


async def first_model():
    async with aiohttp.ClientSession() as session, session.get(f"{BASE_URL}/v1/models") as response:
        return (await response.json())["data"][0]["id"]


def models():
    assert asyncio.run(first_model()) == MODEL


report(
    {
        "models": models,
        "openai": lambda: benchmark(*completion(PROMPT)),
        "openai, token ids": lambda: benchmark(*completion(IDS)),
        "openai, sampling": lambda: benchmark(*completion(PROMPT, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05)),
        "openai, --logprobs": lambda: benchmark(*completion(PROMPT, logprobs=2)),
        "openai-chat": lambda: benchmark(*chat()),
        "openai-chat, sampling": lambda: benchmark(*chat(temperature=0, frequency_penalty=0.1, presence_penalty=0.1)),
    }
)
