"""LiteLLM's SDK, with the providers `openai` and `hosted_vllm`."""

import asyncio
import json
from functools import partial

import litellm
from report import BASE_URL, MODEL, report

MESSAGES = [{"role": "user", "content": "Name the capital of France."}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "A city's weather", "parameters": PARAMETERS},
}


def options(provider):
    location = {"model": f"{provider}/{MODEL}", "api_base": f"{BASE_URL}/v1", "api_key": "none"}
    return {**location, "temperature": 0, "max_tokens": 64, "num_retries": 0}


def chat(provider):
    response = litellm.completion(messages=MESSAGES, **options(provider))
    assert "Paris" in response.choices[0].message.content
    assert response.usage.completion_tokens > 0


def streamed_chat(provider):
    chunks = list(
        litellm.completion(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **options(provider))
    )
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def async_chat(provider):
    response = asyncio.run(litellm.acompletion(messages=MESSAGES, **options(provider)))
    assert "Paris" in response.choices[0].message.content


def tools(provider):
    asked = {"tools": [TOOL], "parallel_tool_calls": False, **options(provider)}
    message = litellm.completion(messages=MESSAGES, tool_choice="required", **asked).choices[0].message
    (call, *_) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}
    history = [
        *MESSAGES,
        message,
        *({"role": "tool", "tool_call_id": each.id, "content": "clear"} for each in message.tool_calls),
    ]
    assert litellm.completion(messages=history, tool_choice="none", **asked).choices[0].message.content


def streamed_tools(provider):
    chunks = list(
        litellm.completion(messages=MESSAGES, tools=[TOOL], tool_choice="required", stream=True, **options(provider))
    )
    whole = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments)["city"] in {"Paris", "Rome"}


def structured_output(provider):
    json_schema = {"name": "answer", "strict": True, "schema": PARAMETERS}
    response_format = {"type": "json_schema", "json_schema": json_schema}
    response = litellm.completion(messages=MESSAGES, response_format=response_format, **options(provider))
    assert json.loads(response.choices[0].message.content)["city"] in {"Paris", "Rome"}


def completions(provider):
    name = {"openai": "text-completion-openai"}.get(provider, provider)
    response = litellm.text_completion(prompt="1, 2, 3, 4,", **options(name) | {"max_tokens": 8})
    assert "5" in response.choices[0].text


CHECKS = (chat, streamed_chat, async_chat, tools, streamed_tools, structured_output, completions)
report(
    {
        f"{check.__name__.replace('_', ' ')} ({provider})": partial(check, provider)
        for provider in ("openai", "hosted_vllm")
        for check in CHECKS
    }
)
