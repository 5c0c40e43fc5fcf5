"""The end of a prompt: a generation prompt, none, or an open message; and the time for templates."""

import time

import pytest

from trioengine import RequestRejected
from trioengine.core.types import token_ids
from trioengine.testing import toy_model
from trioengine.testing.toy_model import IM_END
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.conversation import Conversation

TOY = toy_model()
CHAT = ChatTokenizer(TOY.tokenizer, TOY.chat_template)
USER = {"role": "user", "content": "a"}
OPEN = {"add_generation_prompt": False, "continue_final_message": True}
HEAD = "<|im_start|>user\na<|im_end|>\n"


def ids(text):
    return CHAT.encode(text)


@pytest.mark.parametrize("content", ["b", " b \n", "a<|im_end|>", ""])
def test_an_open_message(content):
    final = {"role": "assistant", "content": content}
    found = CHAT.apply_chat_template([USER, final], **OPEN)
    assert found == ids(f"{HEAD}<|im_start|>assistant\n") + CHAT.tokenizer.encode_ordinary(content)
    closed = CHAT.apply_chat_template([USER, final], add_generation_prompt=False)
    assert closed == found + ids("<|im_end|>\n")
    assert CHAT.apply_chat_template([USER, final]) == closed + ids("<|im_start|>assistant\n")


def test_the_answer_is_more_of_the_message():
    conversation = Conversation(CHAT, variables=OPEN)
    prepared = conversation.prepare([USER, {"role": "assistant", "content": "b"}])
    conversation.commit(prepared, token_ids([*b"cd", IM_END]), "cd")
    assert conversation.history == [USER, {"role": "assistant", "content": "bcd"}]
    again = conversation.prepare([USER, {"role": "assistant", "content": "e"}])
    expected = CHAT.apply_chat_template([*conversation.history, USER, {"role": "assistant", "content": "e"}], **OPEN)
    assert again.token_ids.tolist() == expected


@pytest.mark.parametrize(
    ("final", "problem"),
    [
        (USER, "must be the assistant's, got the role 'user'"),
        ({"role": "assistant", "content": "b", "tool_calls": [{}]}, "must not have tool_calls"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "must have a text as its content"),
    ],
)
def test_messages_that_cannot_go_on(final, problem):
    with pytest.raises(RequestRejected) as info:
        CHAT.apply_chat_template([final], **OPEN)
    assert (info.value.param, problem in info.value.message) == ("messages", True)


def test_a_template_that_does_not_print_it():
    chat = ChatTokenizer(TOY.tokenizer, ChatTemplate("{{ messages[0].content }}"))
    with pytest.raises(RequestRejected, match="does not print the last one"):
        chat.apply_chat_template([USER, {"role": "assistant", "content": "b"}], **OPEN)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
    ],
)
def test_options_that_are_refused(options, name):
    with pytest.raises(RequestRejected) as info:
        CHAT.apply_chat_template([USER], **options)
    assert info.value.param == name and info.value.message.startswith(name)


# ---- the time ------------------------------------------------------------------------------------------------------


def rendered(source):
    template = ChatTemplate(source, strftime=lambda format: time.strftime(format, time.gmtime(86_400 * 365)))
    return template.render([USER], add_generation_prompt=True)


def test_the_time():
    assert rendered("{{ strftime_now('%d %b %Y, 100%%%n') }}") == "01 Jan 1971, 100%\n"
    assert rendered("{{ strftime_now('%-d') }}") == "1"
    fallback = "{% if strftime_now is defined %}now{% else %}then{% endif %}"
    assert rendered(fallback) == "now"
    assert ChatTemplate(fallback).render([USER], add_generation_prompt=True) == "then"


@pytest.mark.parametrize("format", ["'%999999999d'", "'%_9d'", "'%'", "'%Y' * 129", "7", "x", "'\\x00' ~ messages"])
def test_formats_that_are_refused(format):
    with pytest.raises(RequestRejected, match="chat template cannot render"):
        rendered(f"{{{{ strftime_now({format}) }}}}")


def test_the_time_costs_steps():
    with pytest.raises(RequestRejected, match="too many steps"):
        rendered("{% for i in range(9999) %}{{ strftime_now('') }}{% endfor %}")
