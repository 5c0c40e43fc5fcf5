"""Each kind of request that is answered by the model, as a long one of a client that may leave or not read."""

from dataclasses import replace

from helpers.clients import CHAT, chat
from helpers.frames import HANDSHAKE, SAY, event, read_until
from trioengine.testing.simulation import DEFAULT_LIMITS

ROOM = replace(DEFAULT_LIMITS, max_model_len=2048, kv_blocks_total=512)  # for tools in a prompt
LENGTH = 300  # tokens
COMPLETIONS = "/v1/completions"
LONG_TEXT = {"type": "string", "minLength": 400}
FUNCTION = {
    "name": "note",
    "parameters": {
        "type": "object",
        "properties": {"text": LONG_TEXT},
        "required": ["text"],
        "additionalProperties": False,
    },
}
CALLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "note", "schema": FUNCTION["parameters"]}}


def http_request(path, **fields):
    """POST these fields, and do not read the answer."""

    async def ask(client, max_tokens=LENGTH):
        await client.send("POST", path, {**fields, "max_tokens": max_tokens})

    return ask


def chat_request(**fields):
    return http_request(CHAT, **chat("you", **fields))


def completion_request(prompt="you", **fields):
    return http_request(COMPLETIONS, prompt=prompt, temperature=0, ignore_eos=True, **fields)


def realtime_request(**options):
    async def ask(client, max_tokens=LENGTH):
        await client.stream.send_all(HANDSHAKE)
        await read_until(client.stream, b"session.created")
        response = {"temperature": 0, "ignore_eos": True, "max_output_tokens": max_tokens, **options}
        await client.stream.send_all(SAY + event("response.create", response=response))

    return ask


KINDS = {
    "whole": chat_request(),
    "stream": chat_request(stream=True),
    "whole choices": chat_request(n=2),
    "choices": chat_request(n=2, stream=True),
    "whole tools": chat_request(**CALLS),
    "tools": chat_request(**CALLS, stream=True),
    "response format": chat_request(response_format=FORMAT, stream=True),
    "whole completion": completion_request(),
    "completion": completion_request(stream=True),
    "prompts": completion_request(["you", "me"], stream=True),
    "echo": completion_request(echo=True, logprobs=1, stream=True),
    "realtime": realtime_request(),
    "out of band": realtime_request(conversation="none"),
    "realtime tools": realtime_request(tools=[{"type": "function", **FUNCTION}], tool_choice="required"),
}
WEBSOCKETS = {"realtime", "out of band", "realtime tools"}
