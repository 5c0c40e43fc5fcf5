"""Chat templates of a hostile model file: each rendering ends within its budget of steps, memory and output.

Steps are counted as the interpreter's own calls, so the figures are the same on every machine.
"""

import re
import sys
import tracemalloc

import pytest

from trioengine.core.errors import ModelError, RequestRejected
from trioengine.text.chat_template import MAX_SOURCE, ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]
MAX_CALLS = 250_000
MAX_MEMORY = 16 << 20  # bytes
TOO_COSTLY = "takes too many steps|renders too much text|nests its (calls|values) too deeply"
DOUBLED = "{% set ns = namespace(x=['aaaa']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
DOUBLED_TEXT = "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
TUPLES = DOUBLED.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("['aaaa']", "()")
TEXT = "{% set text = 'abcdefgh' * 100000 %}"
LINES = "{% set text = 'a\n' * 100000 %}"

COSTLY = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that prints": "{% for i in range(99999) %}{{ i }}{% endfor %}",
    "loops over a doubled list": "{% set a = range(9999)|list %}{% for i in a * 9999 %}{% endfor %}",
    "a loop whose test is false": "{% for i in range(99999) if i in range(9999)|list %}{% endfor %}",
    "loops over text": "{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% endfor %}{% endfor %}",
    "long constants in a loop": "{% for i in range(9999) %}" + "x" * 60_000 + "{% endfor %}",
    "long constants in a macro": "{% macro f() %}" + "x" * 60_000 + "{% endmacro %}"
    "{% for i in range(9999) %}{% set y = f() %}{% endfor %}",
    "a repeated string": "{{ 'a' * 10**9 }}",
    "a string repeated from the left": "{{ 10**9 * 'a' }}",
    "a repeated list": "{% set x = [1] * 10**9 %}",
    "a repeated tuple": "{% set x = (1, 2) * 10**9 %}",
    "a string that doubles": DOUBLED_TEXT,
    "a string that doubles by +": DOUBLED_TEXT.replace("~", "+"),
    "a string that doubles by %": DOUBLED_TEXT.replace("ns.x ~ ns.x", "'%s%s' % (ns.x, ns.x)"),
    "a string that doubles by format": DOUBLED_TEXT.replace("ns.x ~ ns.x", "'{0}{0}'.format(ns.x)"),
    "a string that doubles by the filter format": DOUBLED_TEXT.replace("ns.x ~ ns.x", "'%s%s'|format(ns.x, ns.x)"),
    "a string that doubles by join": DOUBLED_TEXT.replace("ns.x ~ ns.x", "[ns.x, ns.x]|join"),
    "a string that doubles by its method join": DOUBLED_TEXT.replace("ns.x ~ ns.x", "ns.x.join(['', '', ''])"),
    "a string that doubles by replace": DOUBLED_TEXT.replace("ns.x ~ ns.x", "ns.x|replace('a', 'aa')"),
    "a string that doubles by its method replace": DOUBLED_TEXT.replace("ns.x ~ ns.x", "ns.x.replace('a', 'aa')"),
    "a string that doubles in a block": DOUBLED_TEXT.replace(
        "{% set ns.x = ns.x ~ ns.x %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"
    ),
    "a string that doubles in a macro": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    + DOUBLED_TEXT.replace("ns.x ~ ns.x", "f(ns.x)"),
    "a string that doubles in a filter block": DOUBLED_TEXT.replace(
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set y %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}{% set ns.x = y %}",
    ),
    "text between empty strings": "{{ ('a' * 20000)|replace('', 'b' * 20000) }}",
    "a long separator": "{{ range(20000)|join('b' * 20000) }}",
    "a long separator of a method": "{% set x = ('b' * 20000).join(range(20000)|map('string')|list) %}",
    "indented lines": "{% set x = ('\n' * 20000)|indent(900) %}",
    "indented lines by text": "{% set x = ('\n' * 20000)|indent('a' * 20000) %}",
    "escaped text": TEXT + "{% for i in range(999) %}{% set x = ('&' ~ text)|e %}{% endfor %}",
    "many lines": LINES + "{% for i in range(9999) %}{% set x = text.splitlines() %}{% endfor %}",
    "many words": LINES + "{% for i in range(9999) %}{% set x = text.split() %}{% endfor %}",
    "many parts": LINES + "{% for i in range(9999) %}{% set x = text.split('a') %}{% endfor %}",
    "many letters": TEXT + "{% for i in range(9999) %}{% set x = text|list %}{% endfor %}",
    "many slices": TEXT + "{% for i in range(9999) %}{% set x = text[1:] %}{% endfor %}",
    "many slices of a list": "{% set a = [1] * 30000 %}{% for i in range(9999) %}{% set x = a[1:] %}{% endfor %}",
    "many cases": TEXT + "{% for i in range(9999) %}{% set x = text.upper()|lower|title %}{% endfor %}",
    "many searches": TEXT + "{% for i in range(9999) %}{% set x = 'hgfedcba' * 12 in text %}{% endfor %}",
    "many counts": TEXT + "{% for i in range(9999) %}{% set x = text.count('ba') %}{% endfor %}",
    "many trims": TEXT + "{% for i in range(9999) %}{% set x = text.strip('abcdefgh')|trim('xyz') %}{% endfor %}",
    "many comparisons": TEXT + "{% set b = text ~ '' %}{% for i in range(99999) %}{% set x = text == b %}{% endfor %}",
    "many tests": TEXT + "{% for i in range(9999) %}{% set x = text is lower and text is eq(text ~ '') %}{% endfor %}",
    "many memberships": "{% set a = [1] * 30000 %}{% for i in range(9999) %}{% set x = 2 in a %}{% endfor %}",
    "many selections": "{% for i in range(9999) %}{% set x = range(9999)|select('odd')|list %}{% endfor %}",
    "nothing of many selected": "{{ range(99999)|select('gt', 10**9)|first }}",
    "filters of filters": "{{ (range(9999)|map('string')|map('upper')|map('lower')|map('trim')|list)|length }}" * 9,
    "sorting": "{% for i in range(9999) %}{% set x = range(9999)|sort %}{% endfor %}",
    "sums": "{% for i in range(9999) %}{% set x = range(9999)|sum %}{% endfor %}",
    "JSON of many": "{% for i in range(9999) %}{% set x = range(9999)|list|tojson %}{% endfor %}",
    "JSON with long separators": "{% set x = ([1] * 9999)|tojson(separators=('a' * 9999, ':')) %}",
    "a printed list that doubles": DOUBLED + "{{ ns.x }}",
    "a list that doubles, as text": DOUBLED + "{% set y = ns.x|string %}",
    "a list that doubles, with ~": DOUBLED + "{% set y = 'a' ~ ns.x %}",
    "a list that doubles, with %": DOUBLED + "{% set y = '%s' % (ns.x,) %}",
    "a list that doubles, with format": DOUBLED + "{% set y = '{}'.format(ns.x) %}",
    "a list that doubles, joined": DOUBLED + "{% set y = ns.x|join %}",
    "a list that doubles, as JSON": DOUBLED + "{% set y = ns.x|tojson(indent=2) %}",
    "a list that doubles, compared": DOUBLED + DOUBLED.replace("ns", "ms") + "{% set y = ns.x == ms.x %}",
    "a list that doubles, in a chain": DOUBLED + DOUBLED.replace("ns", "ms") + "{% set y = 1 < 2 != ns.x < ms.x %}",
    "a list that doubles, contained": DOUBLED + DOUBLED.replace("ns", "ms") + "{% set y = ns.x in [ms.x] %}",
    "a list that doubles, tested": DOUBLED + DOUBLED.replace("ns", "ms") + "{% set y = ns.x is eq(ms.x) %}",
    "a list that doubles, counted": DOUBLED + DOUBLED.replace("ns", "ms") + "{% set y = [ns.x].count(ms.x) %}",
    "a list that doubles, sorted": DOUBLED + DOUBLED.replace("ns", "ms") + "{% set y = [ns.x, ms.x]|sort %}",
    "a tuple that doubles, made unique": TUPLES + "{% set y = [ns.x]|unique|list %}",
    "a tuple that doubles, as an argument": TUPLES + "{% set y = 1|round(0, ns.x) %}",
    "a tuple that doubles, as the name of a filter": TUPLES + "{% set y = [1]|map(ns.x)|list %}",
    "a tuple that doubles, as the name of a test": TUPLES + "{% set y = [1]|select(ns.x)|list %}",
    "a tuple that doubles, as an attribute": TUPLES + "{% set y = 'x'|attr(ns.x) %}",
    "a tuple that doubles, as an objection": TUPLES + "{{ raise_exception(message=ns.x) }}",
    "a tuple that doubles, as a change": TUPLES + "{% for i in [1, 2] %}{% set y = loop.changed(ns.x) %}{% endfor %}",
    "a deep tuple, made unique": TUPLES.replace("(ns.x, ns.x)", "(ns.x,)").replace("range(40)", "range(900)")
    + "{% set y = [ns.x]|unique|list %}",
    "a namespace that doubles": DOUBLED.replace("[ns.x, ns.x]", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "a namespace of itself": "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
    "doubled arguments": "{% macro f(n) %}{% if n %}{{ f(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}"
    "{% endmacro %}{{ f(50) }}",
    "a macro that calls itself endlessly": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a macro that loops": "{% macro f(n) %}{% for i in range(99) %}{{ f(n) }}{% endfor %}{% endmacro %}{{ f(1) }}",
    "callers of callers": "{% macro f(n) %}{% set x = caller() %}{% if n %}"
    "{% call f(n - 1) %}{{ x }}{{ x }}{% endcall %}{% endif %}{% endmacro %}{% call f(60) %}x{% endcall %}",
    "many arguments": "{% macro f() %}{% endmacro %}{% for i in range(9999) %}{{ f(*range(9999)) }}{% endfor %}",
    "arguments of a filter": "{% for i in range(9999) %}{{ 'x'|default(*range(9999)) }}{% endfor %}",
    "cycles": "{% set c = cycler(*range(99999)) %}{% for i in range(99999) %}{{ c.next() }}{% endfor %}",
    "much output": "{% for i in range(40) %}" + "x" * 9_999 + "{% endfor %}",
    "much output of one value": "{{ 'x' * 1000000 }}",
    "much output in plane 16": "{{ '\U0010ffff' * 100000 }}",
}
REFUSED_WHILE_RENDERING = {
    "a great power": "{{ 10 ** (10 ** 9) }}",
    "powers of powers": "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x ** 9 %}{% endfor %}",
    "squares": "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a great shift by rounding": "{{ 1|round(-1000000000) }}",
    "a list multiplied by rounding": "{{ [1]|round(9, 'ceil') }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a format with a width from elsewhere": "{{ '%*d' % (1000000000, 1) }}",
    "a precise format": "{{ '%.1000000000f' % 1 }}",
    "a wide format of a key": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "a wide format as a test": "{{ '%1000000000d' is odd }}",
    "a wide format as a divisor": "{{ '%1000000000d' is divisibleby 3 }}",
    "a wide format by a filter": "{{ '%1000000000d'|format(1) }}",
    "a wide format in braces": "{{ '{:1000000000}'.format(1) }}",
    "a width in braces in braces": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a wide method": "{{ 'x'.center(1000000000) }}",
    "zeros": "{{ '1'.zfill(1000000000) }}",
    "tabs": "{{ ('\t' * 99).expandtabs(1000000000) }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "a wide indent": "{{ 'x\ny'|indent(1000000000) }}",
    "a wide indent of JSON": "{{ [1]|tojson(indent=1000000000) }}",
    "a translation": "{{ ('x' * 9999).translate({120: 'y' * 9999}) }}",
    "a format of a format": "{{ '{0.__class__}'.format(1).x.y }}",
    "a tuple as a key of dict()": "{% set y = dict([((1, 2), 1)]) %}",
    "a tuple as a key of dict(), from a filter": "{% set y = dict([[1, 2]|map('abs')]) %}",
    "a tuple as a key of a namespace": "{% set y = namespace([((1, 2), 1)]) %}",
    "a tuple as a key": "{% set t = (1, 2) %}{{ {t: 1} }}",
    "a long range": "{% for i in range(100001) %}{% endfor %}",
    "sums of lists": "{{ [[1], [2]]|sum(start=[]) }}",
    "a change": "{{ messages.append(1) }}",
    "the class of a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "an include": "{{ self._TemplateReference__context.environment.loader.x }}",
}
REFUSED_AT_ONCE = {
    "a wide filter": "{{ 'x'|center(1000000000) }}",
    "a filter with blanks": "{{ [1]|batch(1000000000, 'x')|list }}",
    "many slices of nothing": "{{ []|slice(1000000000)|list }}",
    "a filter of chance": "{{ [1, 2]|random }}",
    "wrapped words": "{{ 'x'|wordwrap(1) }}",
    "a block that shows itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "an include": "{% include 'x' %}",
    "an import": "{% import 'x' as x %}",
    "a parent": "{% extends messages %}",
    "a test that hashes": "{{ (1, 2) is filter }}",
    "another escaping": "{% autoescape true %}{{ 'x' }}{% endautoescape %}",
    "a recursive loop": "{% for i in [[[]]] recursive %}{{ loop(i) }}{% endfor %}",
    "too long a source": "x" * (MAX_SOURCE + 1),
    "deep blocks": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "deep parentheses": "{{ " + "(" * 90 + "1" + ")" * 90 + " }}",
    "very deep parentheses": "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "deep lists": "{{ " + "[" * 150 + "]" * 150 + " }}",
    "a long sum": "{{ " + "1 + " * 9000 + "1 }}",
    "many nots": "{{ " + "not " * 9000 + "1 }}",
    "deep loops": "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "a great number": "{{ " + "9" * 5000 + " }}",
}
CONSTANTS = {  # which Jinja would evaluate while it compiles
    "a repeated string": "{% if false %}{{ 'a' * 10**9 }}{% endif %}",
    "a wide format": "{% if false %}{{ '%1000000000d' % 1 }}{% endif %}",
    "a great power": "{% if false %}{{ 10 ** (10 ** 9) }}{% endif %}",
    "filters": "{% if false %}{{ ('a' * 20000)|replace('', 'b' * 20000) }}{% endif %}",
}


def parameters(templates):
    return pytest.mark.parametrize("source", templates.values(), ids=templates.keys())


def rejection(source):
    """How a rendering ends, within its bounds."""
    template = ChatTemplate(source)
    num_calls = 0

    def count(frame, event, argument):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        template.render(MESSAGES, add_generation_prompt=True)
    except RequestRejected as exc:
        return exc
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert num_calls < MAX_CALLS
        assert peak < MAX_MEMORY
    raise AssertionError("it was rendered")


@parameters(COSTLY)
def test_a_costly_template_ends_within_its_budget(source):
    error = rejection(source)
    assert (error.code, error.param) == ("template_error", "messages")
    assert re.fullmatch(f"messages: the model's chat template ({TOO_COSTLY}) for them", error.message)


@parameters(REFUSED_WHILE_RENDERING)
def test_an_operation_without_bounds_is_refused(source):
    assert "the model's chat template cannot render them" in rejection(source).message


@parameters(REFUSED_AT_ONCE)
def test_a_template_without_bounds_does_not_compile(source):
    with pytest.raises(ModelError, match="the chat template does not compile"):
        ChatTemplate(source)


@parameters(CONSTANTS)
def test_nothing_is_evaluated_while_compiling(source):
    tracemalloc.start()
    try:
        template = ChatTemplate(source)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY
    finally:
        tracemalloc.stop()
    assert template.render(MESSAGES, add_generation_prompt=True) == ""
