"""LlamaIndex: OpenAILike as it is by default (text completions), and as a chat model with tools."""

import asyncio

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from report import BASE_URL, MODEL, report

LOCATION = {"model": MODEL, "api_base": f"{BASE_URL}/v1", "api_key": "none", "max_retries": 0}
QUESTION = "Name the capital of France."


class City(BaseModel):
    """A city."""

    name: str


def default():
    return OpenAILike(**LOCATION)


def chat_model():
    return OpenAILike(
        **LOCATION,
        temperature=0,
        max_tokens=64,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
    )


def complete():
    assert default().complete("1, 2, 3, 4,").text


def stream_complete():
    pieces = list(default().stream_complete("1, 2, 3, 4,"))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].text != ""


def chat():
    assert default().chat([ChatMessage(role="user", content=QUESTION)]).message.content


def stream_chat():
    assert list(default().stream_chat([ChatMessage(role="user", content=QUESTION)]))[-1].message.content


def async_complete():
    assert asyncio.run(default().acomplete("1, 2, 3, 4,")).text


def chat_of_chat_model():
    assert "Paris" in chat_model().chat([ChatMessage(role="user", content=QUESTION)]).message.content


def stream_chat_of_chat_model():
    pieces = list(chat_model().stream_chat([ChatMessage(role="user", content=QUESTION)]))
    assert len(pieces) > 1
    assert "Paris" in pieces[-1].message.content


def complete_of_chat_model():
    assert "Paris" in chat_model().complete(QUESTION).text


def tools():
    asked = []

    def weather(city: str) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return "clear"

    llm, tool = chat_model(), FunctionTool.from_defaults(weather)
    answer = llm.chat_with_tools([tool], user_msg="How is the weather in Rome?", tool_required=True)
    calls = llm.get_tool_calls_from_response(answer)
    for call in calls:
        assert tool(**call.tool_kwargs).content == "clear"
    assert asked


def structured_output():
    assert chat_model().as_structured_llm(City).complete("Name the capital of France.").raw.name


report(
    {
        "complete (default)": complete,
        "streamed complete (default)": stream_complete,
        "chat (default)": chat,
        "streamed chat (default)": stream_chat,
        "async complete (default)": async_complete,
        "complete (chat model)": complete_of_chat_model,
        "chat (chat model)": chat_of_chat_model,
        "streamed chat (chat model)": stream_chat_of_chat_model,
        "tools (chat model)": tools,
        "structured output (chat model)": structured_output,
    }
)
