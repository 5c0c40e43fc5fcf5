"""Chat templates render as with Jinja's own sandbox, well within their budget."""

import json
import threading
import tracemalloc

import pytest
from helpers.known_templates import EXPRESSIONS, KNOWN, STATEMENTS
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trioengine.core.errors import ModelError, RequestRejected
from trioengine.testing.toy_model import toy_model
from trioengine.text.chat_template import ChatTemplate
from trioengine.text.chat_tokenizer import ChatTokenizer
from trioengine.text.conversation import Conversation
from trioengine.text.template_operations import Budget, TemplateTooCostly

TEXT = ("Lorem ipsum dolor sit amet, \n" * 150)[:4096]
CALL = {"id": "x1", "function": {"name": "f", "arguments": {"a": [1, {"b": "ü"}]}}}
CONVERSATIONS = {
    "one message": [{"role": "user", "content": "hello"}],
    "100 turns of 4 KB texts": [
        {"role": "system", "content": "be nice"},
        *({"role": ("user", "assistant")[index % 2], "content": TEXT} for index in range(199)),
    ],
    "100 turns of wide texts": [
        {"role": ("user", "assistant")[index % 2], "content": "\U0001f600é" * 1024} for index in range(199)
    ],
    "one long message": [{"role": "user", "content": TEXT * 250}],
    "tools": [
        {"role": "user", "content": "hé"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nok"},
        {"role": "user", "content": "again"},
    ],
}


def rendered_by_jinja(source, messages):
    """As the template is rendered without bounds; None where it refuses the messages."""

    def refuse(message):
        raise ValueError(message)

    def to_json(value, indent=None):
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    variables = {"add_generation_prompt": True, "tools": None, "bos_token": "<s>", "eos_token": "</s>"}
    try:
        return environment.from_string(source).render(messages=messages, **variables)
    except ValueError:
        return None


def rendered(source, messages=()):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, add_generation_prompt=True)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
@pytest.mark.parametrize("source", KNOWN.values(), ids=KNOWN.keys())
def test_known_templates_render_as_with_jinja(source, messages, monkeypatch):
    budgets = []

    class Kept(Budget):
        def __init__(self, messages):
            super().__init__(messages)
            budgets.append((self, self.steps))

    monkeypatch.setattr("trioengine.text.chat_template.Budget", Kept)
    expected = rendered_by_jinja(source, messages)
    if expected is None:
        with pytest.raises(RequestRejected, match="the chat template raised"):
            rendered(source, messages)
        return
    assert rendered(source, messages) == expected
    ((budget, steps),) = budgets
    assert budget.steps > 0.4 * steps


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expressions_have_the_values_of_jinja(expression):
    source = f"{{% set y = {expression} %}}{{{{ {expression} }}}}|{{{{ y }}}}"
    assert rendered(source) == rendered_by_jinja(source, ())


@pytest.mark.parametrize("source", STATEMENTS)
def test_statements_render_as_in_jinja(source):
    assert rendered(source) == rendered_by_jinja(source, ())


# ---- the budget ---------------------------------------------------------------------------------------------------

DOUBLING = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


def test_the_budget_is_the_same_for_equal_conversations():
    first, second = Budget(CONVERSATIONS["tools"]), Budget(CONVERSATIONS["tools"])
    assert first.steps == second.steps > Budget(CONVERSATIONS["one message"]).steps


def test_an_exceeded_budget_stays_so():
    budget = Budget([])
    for steps in (10**9, 0, 0):
        with pytest.raises(TemplateTooCostly):
            budget.charge(steps)


def test_memory_grows_with_the_conversation_alone():
    """800 KB of messages."""
    tracemalloc.start()
    try:
        with pytest.raises(RequestRejected, match="takes too many steps"):
            rendered(DOUBLING, CONVERSATIONS["100 turns of 4 KB texts"])
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_lazy_filters_form_no_chain():
    """A chain of generators would take Python's recursion, or the stack, when it is read or dropped."""
    source = (
        "{% set ns = namespace(x=[1]) %}{% for i in range(9999) %}{% set ns.x = ns.x|map('string') %}{% endfor %}"
        "{{ ns.x|first }}{{ [1, 2]|map('string')|select('ne', '1')|first }}"
    )
    assert rendered(source, CONVERSATIONS["100 turns of 4 KB texts"]) == "12"


def test_renderings_in_threads_have_budgets_of_their_own():
    template = ChatTemplate("{% for i in range(500) %}{% set x = 'a' ~ i %}{% endfor %}{{ messages[0].content }}")
    texts = []

    def render(content):
        for _ in range(5):
            texts.append(template.render([{"content": content}], add_generation_prompt=True))

    threads = [threading.Thread(target=render, args=(content,)) for content in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == ["a"] * 5 + ["b"] * 5


def test_a_costly_template_refuses_the_request_and_nothing_changes():
    conversation = Conversation(ChatTokenizer(toy_model().tokenizer, ChatTemplate(DOUBLING)))
    with pytest.raises(RequestRejected, match="the model's chat template takes too many steps for them"):
        conversation.prepare("hello")
    assert conversation.history == []


def test_a_refusal_by_the_template_is_shortened():
    with pytest.raises(RequestRejected, match="the chat template raised: no no") as caught:
        rendered("{{ raise_exception('no ' * 2000) }}")
    assert len(caught.value.message) < 1100


def test_a_filter_that_is_left_out_is_named():
    with pytest.raises(ModelError, match="does not compile: No filter named 'urlize'"):
        ChatTemplate("{{ messages|urlize }}")


def test_templates_that_print_calls():
    printing = {name for name, source in KNOWN.items() if ChatTemplate(source, bos_token="<s>").prints_calls()}
    assert printing == {"qwen 3", "llama 3", "mistral", "hermes"}
