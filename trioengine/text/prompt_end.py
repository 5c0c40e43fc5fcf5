"""The end of a prompt: the generation prompt, the end of its last message, or that message left open."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from trioengine.core.errors import RequestRejected
from trioengine.core.wording import brief
from trioengine.text.messages import Message

ADD_PROMPT, CONTINUE = OPTIONS = ("add_generation_prompt", "continue_final_message")
HAS_CALLS = "must not have tool_calls"  # the problem of a final message that is to be continued
_MARK = "\U0010fffe"  # not a character: put behind the final content, to find its end in a rendering


class PromptEnd(enum.Enum):
    """The text before an answer."""

    GENERATION_PROMPT = enum.auto()
    MESSAGE = enum.auto()
    OPEN_MESSAGE = enum.auto()  # the answer continues the assistant's message

    @classmethod
    def of(cls, options: Mapping[str, Any], where: str = "") -> PromptEnd:
        """Return the end for `add_generation_prompt` and `continue_final_message`, as transformers has them.

        None stands for the default: true, and false. Raises RequestRejected for other values than booleans, and if both
        are true.
        """
        for name in OPTIONS:
            if options.get(name) is not None and not isinstance(options[name], bool):
                param = where + name
                message = f"{param} must be true or false, got {brief(options[name])}"
                raise RequestRejected("invalid_value", message, param=param)
        adds_prompt = options.get(ADD_PROMPT) is not False
        if not options.get(CONTINUE):
            return cls.GENERATION_PROMPT if adds_prompt else cls.MESSAGE
        if adds_prompt:
            param = where + CONTINUE
            message = f"{param} needs {where}{ADD_PROMPT}=false: true, the default, does not go with it"
            raise RequestRejected("invalid_value", message, param=param)
        return cls.OPEN_MESSAGE


def marked(messages: Sequence[Message]) -> Sequence[Message]:
    """Mark the end of the final message. Raises RequestRejected if it is not an assistant's text that can go on."""
    last = messages[-1] if messages else {}
    problem = None
    if last.get("role") != "assistant":
        problem = f"must be the assistant's, got the role {brief(last.get('role'))}"
    elif last.get("tool_calls"):
        problem = HAS_CALLS
    elif not isinstance(last.get("content"), str):
        problem = "must have a text as its content"
    if problem is not None:
        raise not_continued(problem)
    return [*messages[:-1], {**last, "content": last["content"] + _MARK}]


def not_continued(problem: str) -> RequestRejected:
    """Return the error of a final message that cannot be continued."""
    message = f"messages: with continue_final_message the last one {problem}"
    return RequestRejected("invalid_value", message, param="messages")


def cut_at_mark(rendering: str) -> str:
    """Cut the rendering of marked messages behind the content of the final one.

    Raises RequestRejected if the template does not print it.
    """
    text, mark, _ = rendering.rpartition(_MARK)
    if not mark:
        problem = "the model's chat template does not print the last one, which cannot be continued"
        raise RequestRejected("template_error", f"messages: {problem}", param="messages")
    return text


def with_answer(messages: Sequence[Message], end: PromptEnd, answer: Message) -> tuple[Message, ...]:
    """Return the messages of a prompt, and the answer to it: a message of its own, or more of the last one.

    `answer` has the fields of an assistant's message.
    """
    if end is PromptEnd.OPEN_MESSAGE:
        last = messages[-1]
        return (*messages[:-1], {**last, **answer, "content": last["content"] + answer["content"]})
    return (*messages, {"role": "assistant", **answer})
