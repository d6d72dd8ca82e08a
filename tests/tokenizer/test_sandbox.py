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


@pytest.mark.parametrize(
    "source",
    [
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
        ("{{ strftime_now is defined }}", "False"),
        ("{{ tools is none }}{{ nothing is defined }}", "TrueFalse"),
    ],
)
def test_the_dialect_of_chat_templates_works(source: str, text: str) -> None:
    assert render(source) == text
