"""The texts for a Realtime client: the toy model's answers, and their places in a response."""

from trioengine.testing import toy_answer

GREEDY = {"temperature": 0, "max_output_tokens": 40}
LONG = {"temperature": 0, "max_output_tokens": 200, "ignore_eos": True}


def reference(clients, messages, max_tokens=40, *, ignore_eos=False):
    tokenizer = clients.engine.tokenizer
    ids = toy_answer(tokenizer.apply_chat_template(messages), max_tokens, ignore_eos=ignore_eos)
    return tokenizer.decode(ids)


def text_of(response):
    (item,) = response["output"]
    (part,) = item["content"]
    return part["text"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}
