"""The expressions and statements that chat templates are made of."""
# ruff: noqa: E501

EXPRESSIONS = r"""
'ab' * 3
3 * 'ab'
[1] * 2
7 // 2
7 / 2
7 % 4
2 ** 8
-3 + 1.5
1 + true
'%s-%d' % ('a', 1)
'%(a)s%%' % {'a': 1}
'(%05.2f) 2024' % 3.14159
'{}{x:>4}'.format(1, x=2)
'a' ~ 1 ~ none ~ [1, 'b']
'b' in 'abc'
'x' not in ['a']
1 < 2 <= 2 != 3
'a' in {'a': 1}
2 in range(3)
3 in [1, 2]|map('abs')
[1, 2, 3][::-1]
'abcdef'[1:5:2]
(1, 2, 3)[:2]
{'a': 1}.items()|list
{'a': 1}.get('b', 2)
{'a' ~ 1: 2}
' ab '|trim
'xab'|trim('x')
'ab'|upper|lower|capitalize|title
'aab'|replace('a', 'b', 1)
'a\nb'|indent
'a\n\nb'|indent(2, true, true)
'a\nb'|indent('> ')
[1, 'a']|join('-')
[{'a': 1}]|join(',', attribute='a')
'abc'|first ~ 'abc'|last
[3, 1, 2]|sort|string
[3, 1]|max + [3, 1]|min
[1, 2]|sum
[1, 1]|unique|list
[{'a': 2}]|sum(attribute='a')
{'b': 1, 'a': 2}|dictsort
{'a': 1}|items|list
'3'|int + '1.5'|float
-2|abs
3.14159|round(2)
2.5|round(0, 'floor')
none|default('x')
''|d('x', true)
'abc'|reverse
'a b c'|truncate(4)
[1, 2, 3]|select('odd')|list
[1, 2]|reject('even')|list
[1]|map('string')|list
'%s'|format(1)
'abc'|length
[{'a': 1}]|selectattr('a', 'eq', 1)|list
[{'a': 1}]|rejectattr('a')|list
[{'a': 1}]|map(attribute='a')|list
[{'a': 1}, {'a': 1}]|groupby('a')|list|length
'a'|attr('upper') is defined
{'a': [1, 'ü']}|tojson
[]|tojson
{'a': [1]}|tojson(indent=2)
'a' is lower
'A' is upper
3 is odd
4 is even
9 is divisibleby 3
1 is in [1]
1 is number
'a' is string
{} is mapping
[] is sequence
none is none
x is undefined
1 is ge 1
1 is eq 1
'a b'.split()
'a,b,c'.split(',', 1)
'a,b'.rsplit(',')
'a\nb'.splitlines()
'-'.join(['a', 'b'])
'abc'.find('c')
'abc'.count('b')
'abc'.replace('b', '')
'abc'.startswith(('a', 'b'))
'abc'.endswith('c')
'xabx'.strip('x')
'a-b'.partition('-')
'a'.rjust(3) ~ 'a'.ljust(3) ~ 'a'.center(3) ~ '7'.zfill(3)
'a1'.isalnum()
'a'.upper().lower().title().capitalize()
[1, 2].index(2)
'ab'.removeprefix('a')
[1].copy()
cycler(1, 2).next()
namespace(a=1).a
dict(a=1)
range(3)|list
'<a>'|safe
'abc' if x else 'd'
joiner(',')()
x
none
1.0
""".strip().splitlines()

STATEMENTS = (
    "{% for a in [1, 2, 3] if a is odd %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ a }}{% else %}x{% endfor %}",
    "{% for a in [] %}{% else %}empty{% endfor %}{% for a in x %}{% else %}undefined{% endfor %}",
    "{% for a in [1, 2, 3, 4]|select('even') %}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{% endfor %}",
    "{% for a, b in {'a': 1, 'b': 2}.items() %}{{ loop.cycle('x', 'y') }}{{ a }}{{ b }}{{ loop.changed(a) }}{% endfor %}",
    "{% for a in 'abc' %}{% if a == 'b' %}{% continue %}{% endif %}{{ a }}{% if a == 'c' %}{% break %}{% endif %}{% endfor %}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}{{ f(1, 3, 4, c=5) }}{{ f(*[1, 2, 3]) }}",
    "{% macro f() %}<{{ caller(1) }}>{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}{{ f(**{'caller': none}) if false }}",
    "{% set ns = namespace(x=1) %}{% for i in range(3) %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}",
    "{% set x %}a{{ 1 }}{% endset %}{% set y | upper %}b{% endset %}{{ x }}{{ y }}{% filter upper %}c{{ x }}{% endfilter %}",
    "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}{% set a, b = [1, 2] %}{{ b }}",
    "{% if x is defined %}a{% elif 1 > 2 %}b{% elif true %}c{% else %}d{% endif %}  \n  {%- if 1 %} e {% endif -%}\n f",
)
