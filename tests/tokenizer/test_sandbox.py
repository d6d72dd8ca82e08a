"""This file tests that a template from a stranger can do nothing, and little of it (B193)."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.tokenizer.chat import BadTemplate, ChatTemplates
from actors.tokenizer.prompt import Refused
from messages.tokenizer import Chat
from messages.types import Fault

CHAT = Chat(b'[{"role": "user", "content": "hi there"}]')


def render(source: str, *, chars_max: int = 10_000) -> str:
    return ChatTemplates({"default": source}, {}).render(CHAT, chars_max=chars_max, context_len=9)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ (messages|attr('__class__'))() }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages.clear() }}",
        "{{ messages | join(attribute='__class__') }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ lipsum.__globals__['os'].system('true') }}",
        "{{ 'x'.ljust(10) }}",
        "{{ 'x'.encode().ljust(10) }}",
        "{{ (1).to_bytes(10, 'big') }}",
        "{{ [[1], [2]] | sum(start=[]) }}",
        "{{ '{:>10}'.format('x') }}",
    ],
)
def test_a_template_reaches_nothing_and_changes_nothing(source: str) -> None:
    with pytest.raises(Refused) as raised:
        render(source)
    message = raised.value.problem.message
    assert "cannot render" in message
    assert "class" not in message and "/" not in message


def test_a_hostile_template_leaves_no_mark_on_the_disk(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    touch = f"open('{marker}', 'w')"
    for source in (
        "{% for c in ''.__class__.__base__.__subclasses__() %}{{ c.__init__.__globals__ }}"
        f"{{{{ c.__init__.__globals__['__builtins__']['eval'](\"{touch}\") }}}}{{% endfor %}}",
        "{{ cycler.__init__.__globals__.os.popen('touch " + str(marker) + "').read() }}",
        "{{ raise_exception.__globals__.__builtins__." + touch + " }}",
    ):
        with pytest.raises(Refused):
            render(source)
    assert not marker.exists()


# A few lists, and a text or a comparison of them that would never end.
TWICE = (
    "{% set n = namespace(x=[1]) %}{% for i in range(64) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
TUPLES = TWICE.replace("[n.x, n.x]", "(n.x, n.x)").replace("[1]", "(1,)")
LISTS = "{% set a = range(9999) | list %}{% set b = range(9999) | list %}"
OFTEN = LISTS + "{% for i in range(9999) %}"
LONG = "{% set t = 'a' * 9999 %}"


@pytest.mark.parametrize(
    "source",
    [
        TWICE + "{{ n.x }}",
        TWICE + "{{ n }}",
        TWICE + "{{ {'a': n.x}.items() }}",
        TWICE + "{{ n.x | tojson }}",
        TWICE + "{{ n.x | string | length }}",
        TWICE + "{{ [n.x] | map('upper') | list }}",
        TWICE + "{{ [n.x] | select('upper') | list }}",
        TWICE + "{{ [n.x] | join }}",
        TWICE + "{{ n.x | replace('a', 'b') }}",
        TWICE + "{{ (n.x ~ '') | length }}",
        TWICE + "{{ '%s' % [n.x] }}",
        TWICE + "{{ '%s' | format(n.x) }}",
        TWICE + "{{ '{}'.format(n.x) }}",
        TWICE + "{% set m = n.x %}" + TWICE + "{{ m == n.x }}",
        TWICE + "{% set m = n.x %}" + TWICE + "{{ m in [n.x] }}",
        TWICE + "{% set m = n.x %}" + TWICE + "{{ m is eq(n.x) }}",
        TWICE + "{% set m = n.x %}" + TWICE + "{{ [m].count(n.x) }}",
        TWICE + "{{ [n.x, n.x] | sort }}",
        TUPLES + "{{ {n.x: 1} }}",
        TUPLES + "{{ {}[n.x] }}",
        TUPLES + "{{ {}.get(n.x) }}",
        TUPLES + "{{ [n.x] | unique | list }}",
        OFTEN + "{% if a == b %}{% endif %}{% endfor %}",
        OFTEN + "{% if -1 in a %}{% endif %}{% endfor %}",
        OFTEN + "{% if a.count(-1) %}{% endif %}{% endfor %}",
        "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='aaaa') %}"
        "{% for i in range(64) %}{% set n.x = d(n.x) %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}"
        "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
        LONG + "{{ ('%s' * 999) % ((t,) * 999) }}",
        LONG + "{{ ('%(t)s' * 999) % {'t': t} }}",
        LONG + "{{ ('{0}' * 999).format(t) }}",
        LONG + "{{ t | replace('a', '\n') | indent(999) }}",
        "{{ 'a' | indent(999999999) }}",
        "{{ [1] | batch(999999999, 'x') | list }}",
        "{{ [1] | slice(999999999) | list }}",
        "{{ 1.5 | round(999999999, 'ceil') }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x=messages) %}{% for i in range(64) %}"
        "{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}"
        "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}"
        "{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}"
        "{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(x=9) %}{% for i in range(64) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * [1] }}",
        "{{ 2 ** 99999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' | format(999999999, 1) }}",
        "{{ messages | tojson(indent=999999) }}",
        "{{ ','.join(['aaaaaaaaaa'] * 9000) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(60) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
)
def test_work_without_bound_is_ended(source: str) -> None:
    with pytest.raises(Refused) as raised:
        render(source)
    assert raised.value.problem.fault is Fault.INTERNAL
    assert "too much work" in raised.value.problem.message


def test_a_prompt_that_grows_too_long_is_refused_as_such() -> None:
    with pytest.raises(Refused) as raised:
        render("{% for i in range(5000) %}abc{% endfor %}", chars_max=1000)
    assert raised.value.problem.code == "context_length_exceeded"


TRIMMED = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"


@pytest.mark.parametrize("source", [TRIMMED, "{% macro m(x) %}{{ x }}{% endmacro %}" + TRIMMED])
def test_a_message_that_is_much_too_long_is_the_callers_fault(source: str) -> None:
    for char_count in (1500, 2500, 3500):
        chat = Chat(b'[{"role": "user", "content": "%s"}]' % (b"a" * char_count))
        templates = ChatTemplates({"default": source}, {})
        with pytest.raises(Refused) as raised:
            templates.render(chat, chars_max=1000, context_len=9)
        assert raised.value.problem.code == "context_length_exceeded"


def test_a_requests_own_template_that_does_too_much_is_the_callers_fault() -> None:
    chat = Chat(CHAT.messages_json, template=TWICE + "{{ n.x }}")
    with pytest.raises(Refused) as raised:
        ChatTemplates({"default": ""}, {}).render(chat, chars_max=1000, context_len=9)
    problem = raised.value.problem
    assert (problem.fault, problem.param) == (Fault.INVALID, "chat_template")


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 'a' | center(10) }}", "{{ x", "{{ 1 | nope }}"]
)
def test_a_template_that_cannot_be_compiled_says_where(source: str) -> None:
    with pytest.raises(BadTemplate, match="line 1"):
        ChatTemplates({"default": source}, {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}\n  {% if m.role %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        (
            "{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
            "13",
        ),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{{ {'b': 'é<', 'a': [1]} | tojson }}", '{"b": "é<", "a": [1]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("a{% generation %}{% set x = 'b' %}{{ x }}{% endgeneration %}c", "abc"),
        ("{{ 'a-b'.split('-')[-1] }}{{ ' x '.strip() }}{{ 'ab'[::-1] }}", "bxba"),
        ("{{ 'aXbX'.replace('X', '-', 1) }}{{ 'aX' | replace('X', '+') }}", "a-bXa+"),
        (
            "{{ ', '.join(['a', 'b']) }}{{ messages | map(attribute='role') | join('|') }}",
            "a, buser",
        ),
        ("{{ messages | join(', ', attribute='role') }}", "user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ '%s:%05d' % ('a', 3) }}{{ '{}!'.format('b') }}{{ '%s' | format('c') }}", "a:00003b!c"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) ~ m(2) }}", "[1][2]"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}", "a1True"),
        ("{% for m in messages | list %}{{ loop.index0 }}/{{ loop.length }}{% endfor %}", "0/1"),
        ("{% for x in range(3) | reverse %}{{ x }}{{ ',' if not loop.last }}{% endfor %}", "2,1,0"),
        ("{% filter upper %}abc{% endfilter %}", "ABC"),
        ("{{ 1 < 2 < 3 }}{{ messages == messages }}{{ 'a' not in 'b' }}", "TrueTrueTrue"),
        ("{{ [1, 2] | sum }}{{ 'a\nb' | indent(2) }}{{ 1.55 | round(1) }}", "3a\n  b1.6"),
        (
            "{{ ['b', 'a'] | sort | first }}{{ messages[0] in messages }}{{ 3 is gt 2 }}",
            "aTrueTrue",
        ),
        ("{{ strftime_now is defined }}", "False"),
        ("{{ tools is none }}{{ nothing is defined }}", "TrueFalse"),
    ],
)
def test_the_dialect_of_chat_templates_works(source: str, text: str) -> None:
    assert render(source) == text
