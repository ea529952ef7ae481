"""Chat templates that work for too long within one call of C, or ask for too much memory, in their process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Final

import pytest

from ovmstrio.core.errors import InvalidField
from ovmstrio.core.generation import Conversation
from ovmstrio.openvino.engine.template_process import Renderings, TemplateProcess

_HOSTILE: Final = Conversation(({"role": "user", "content": "hostile"},))
_PLAIN: Final = Conversation(({"role": "user", "content": "plain"},))
_SHARED: Final = (
    "{%- set ns = namespace(a=[1, 2], b=[1, 2], t=(1, 2), u=(1, 2), d={'k': 1}, e={'k': 1}) -%}"
    "{%- for i in range(60) -%}{%- set ns.a = [ns.a, ns.a] -%}{%- set ns.b = [ns.b, ns.b] -%}"
    "{%- set ns.t = (ns.t, ns.t) -%}{%- set ns.u = (ns.u, ns.u) -%}"
    "{%- set ns.d = {'x': ns.d, 'y': ns.d} -%}{%- set ns.e = {'x': ns.e, 'y': ns.e} -%}{%- endfor -%}"
)
"""Lists, tuples and dicts that have 2 ** 60 leaves, in 60 objects each; a is equal to b, t to u and d to e."""
_LONG: Final = "{%- set s = 'ab' * 900000 -%}"
_NUMBERS: Final = "{%- set n = range(90000) | list -%}"

# Each uses CPU time or memory without a bound of its own.
_COMPARISONS: Final = [
    "{{ ns.a == ns.b }}",
    "{{ ns.a != ns.b }}",
    "{{ ns.t < ns.u }}",
    "{{ ns.t >= ns.u }}",
    "{{ ns.d == ns.e }}",
    "{{ ns.a in [ns.b, 1] }}",
    "{{ ns.a not in [ns.b] }}",
    "{% if ns.a == ns.b %}x{% endif %}",
    "{{ 1 if ns.t == ns.u else 2 }}",
    "{{ ns.a is eq ns.b }}",
    "{{ ns.a is ne(ns.b) }}",
    "{{ ns.t is lessthan ns.u }}",
    "{{ ns.a is in [ns.b] }}",
    "{{ [ns.b].count(ns.a) }}",
    "{{ [ns.b].index(ns.a) }}",
    "{{ [ns.t, ns.u] | sort }}",
    "{{ [ns.t, ns.u] | max }}",
    "{{ [ns.t, ns.u] | min }}",
    "{{ [{'k': ns.t}, {'k': ns.u}] | groupby('k') }}",
    "{{ [{'k': ns.t}, {'k': ns.u}] | sort(attribute='k') }}",
    "{{ [ns.b] | select('eq', ns.a) | list }}",
    "{{ [ns.b] | reject('ne', ns.a) | list }}",
    "{{ [{'k': ns.a}] | selectattr('k', 'eq', ns.b) | list }}",
    "{{ dict(x=ns.a).values() | list == [ns.b] }}",
    "{{ {'x': ns.a}.items() | list == {'x': ns.b}.items() | list }}",
]
_HASHES: Final = [
    "{{ {ns.t: 1} }}",
    "{{ {}.get(ns.t) }}",
    "{{ [ns.t, ns.u] | unique | list }}",
    "{{ {'a': 1}[ns.t] }}",
    "{{ ns.t in {'a': 1} }}",
    "{{ dict([(ns.t, 1)]) }}",
]
_TEXTS: Final = [
    "{{ ns.a }}",
    "{{ ns.a | string }}",
    "{{ ns.a ~ '' }}",
    "{{ '%s' % (ns.a,) }}",
    "{{ '%r' | format(ns.a) }}",
    "{{ '{}'.format(ns.d) }}",
    "{{ ns.a | tojson }}",
    "{{ ns.d | tojson(indent=1) }}",
    "{{ ns.a | pprint }}",
    "{{ [ns.a] | join }}",
    "{{ ns.d | urlencode }}",
    "{{ ns.a | escape }}",
    "{{ [ns.a] | map('string') | join }}",
    "{{ ns.d | xmlattr }}",
    "{{ ns.a | first | upper }}",
    "{{ ns.t | replace('1', '2') }}",
    "{{ raise_exception(ns.a) }}",
]
_REPEATED: Final = [
    _LONG + "{% for i in range(15000) %}{% if s == 'ab' * 900000 %}{% endif %}{% endfor %}",
    _LONG + "{% for i in range(15000) %}{% if ('b' * 99999 + 'c') in s %}{% endif %}{% endfor %}",
    _NUMBERS + "{% for i in range(15000) %}{% if -1 in n %}{% endif %}{% endfor %}",
    _NUMBERS + "{% set m = range(90000) | list %}{% for i in range(15000) %}{% if n == m %}{% endif %}{% endfor %}",
    _NUMBERS + "{% for i in range(15000) %}{% if n | sum %}{% endif %}{% endfor %}",
    _NUMBERS + "{% for i in range(15000) %}{% if n | max %}{% endif %}{% endfor %}",
    _NUMBERS + "{% for i in range(15000) %}{% if n.index(89999) %}{% endif %}{% endfor %}",
    _LONG + "{% for i in range(15000) %}{% if s.count('ab' * 400000 + 'b') %}{% endif %}{% endfor %}",
    "{% set w = 'a' * 90000 %}{% for i in range(15000) %}{% set x = w | wordcount %}{% endfor %}",
    "{% set x = '{:{}{}}'.format(1, 99999, 9999) %}",
    "{{ '{:{}{}}'.format('a', '99999', '99999') | length }}",
    "{% macro f(n) %}{% for i in range(30) %}{% if n %}{{ f(n - 1) }}{% endif %}{% endfor %}{% endmacro %}{{ f(9) }}",
]
_CASES: Final = [_SHARED + each for each in (*_COMPARISONS, *_HASHES, *_TEXTS)] + _REPEATED
_DEFAULT: Final = [
    _SHARED + each
    for each in (
        "{{ ns.a == ns.b }}",
        "{{ ns.a is in [ns.b] }}",
        "{{ [ns.t, ns.u] | sort }}",
        "{{ [{'k': ns.t}, {'k': ns.u}] | groupby('k') }}",
        "{{ {ns.t: 1} }}",
        "{{ ns.a | tojson }}",
        "{{ '%s' % (ns.a,) }}",
        "{{ [ns.b].count(ns.a) }}",
    )
] + [_REPEATED[2], _REPEATED[10]]
_LIMIT: Final = 0.3


def _guarded(source: str) -> str:
    """Make a template hostile for one conversation, and plain for others."""
    return "{% if messages[0].content == 'hostile' %}" + source + "{% endif %}fine"


@pytest.fixture
def templates() -> Iterator[list[TemplateProcess]]:
    """End the processes that a test appends."""
    made: list[TemplateProcess] = []
    yield made
    for each in made:
        each.close()


def _check_is_stopped(source: str, templates: list[TemplateProcess], cpu_seconds: float) -> None:
    process = TemplateProcess({"source": _guarded(source)}, "the chat template x.jinja", cpu_seconds)
    templates.append(process)
    with pytest.raises(InvalidField) as refused:
        process.render(_HOSTILE)
    assert refused.value.message.startswith("the chat template x.jinja ")
    assert len(refused.value.message) < 5000
    assert process.pid != os.getpid()
    assert process.render(_PLAIN) == "fine"


@pytest.mark.parametrize("source", _DEFAULT)
def test_a_template_that_uses_too_much_cpu_time_is_refused_and_the_next_rendering_works(
    source: str, templates: list[TemplateProcess]
) -> None:
    """Wherever it spends the time, and also where it asks for all memory."""
    _check_is_stopped(source, templates, _LIMIT)


@pytest.mark.slow
@pytest.mark.parametrize("source", _CASES)
def test_no_kind_of_template_uses_more_cpu_time_than_its_limit(source: str, templates: list[TemplateProcess]) -> None:
    """With the limit of real engines."""
    _check_is_stopped(source, templates, 2.0)


def test_a_template_process_that_is_killed_or_stopped_is_replaced(templates: list[TemplateProcess]) -> None:
    """Its rendering fails with the reason, or is done by the next process if none was under way."""
    process = TemplateProcess({"source": _guarded(_DEFAULT[0])}, "the chat template")
    templates.append(process)
    assert process.render(_PLAIN) == "fine"
    process.begin(_HOSTILE)
    os.kill(process.pid, signal.SIGSEGV)
    assert process.has_ended(30)
    with pytest.raises(InvalidField, match="the chat template ended its process with status -11"):
        process.take()
    assert process.render(_PLAIN) == "fine"


def test_requests_wait_while_another_is_rendered_and_can_be_withdrawn(templates: list[TemplateProcess]) -> None:
    """They are rendered in the order of their requests."""
    process = TemplateProcess({"source": _guarded(_DEFAULT[0])}, "the chat template", _LIMIT)
    templates.append(process)
    renderings = Renderings[str](process)
    renderings.add("hostile", _HOSTILE, 0)
    for name in ("first", "second", "third"):
        renderings.add(name, _PLAIN, 30)
    assert renderings.waiting == 4
    renderings.withdraw("second")
    renderings.withdraw("hostile")
    assert renderings.waiting == 2
    taken = []
    while renderings.seconds_left is not None:
        assert process.has_ended(30)
        taken.append(renderings.take())
    assert taken == [None, ("first", "fine"), ("third", "fine")]


@pytest.mark.parametrize(("source", "why"), [("{% if %}", "cannot be used"), ("{{ 1 // 0 }}", "ZeroDivisionError")])
def test_a_template_that_is_none_or_fails_is_the_error_of_each_request(
    source: str, why: str, templates: list[TemplateProcess]
) -> None:
    """With the name of the template."""
    process = TemplateProcess({"source": source}, "the chat template x.jinja")
    templates.append(process)
    for _ in range(2):
        with pytest.raises(InvalidField, match=rf"the chat template x\.jinja .*{why}"):
            process.render(_PLAIN)
