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


# Each uses CPU time or memory in one call of C, which only the limit of the process ends.
_HOSTILE_SOURCES: Final = [
    *(
        _SHARED + source
        for source in (
            "{{ ns.a == ns.b }}",
            "{{ ns.a is in [ns.b] }}",
            "{{ [ns.t, ns.u] | sort }}",
            "{{ [{'k': ns.t}, {'k': ns.u}] | groupby('k') }}",
            "{{ {ns.t: 1} }}",
            "{{ ns.a | tojson }}",
            "{{ '%s' % (ns.a,) }}",
            "{{ [ns.b].count(ns.a) }}",
        )
    ),
    "{% set n = range(90000) | list %}{% for i in range(15000) %}{% if -1 in n %}{% endif %}{% endfor %}",
    "{{ '{:{}{}}'.format('a', '99999', '99999') | length }}",
]
"""Lists, tuples and dicts that have 2 ** 60 leaves, in 60 objects each; a is equal to b, t to u and d to e."""

_LIMIT_SECONDS: Final = 0.3


def _guarded(source: str) -> str:
    """Make a template hostile for one conversation, and plain for others."""
    return "{% if messages[0].content == 'hostile' %}" + source + "{% endif %}fine"


@pytest.fixture
def templates() -> Iterator[list[TemplateProcess]]:
    made: list[TemplateProcess] = []
    yield made
    for each in made:
        each.close()


@pytest.mark.parametrize("source", _HOSTILE_SOURCES)
def test_template_that_uses_too_much_cpu_time_or_memory_is_refused_and_the_next_rendering_works(
    source: str, templates: list[TemplateProcess]
) -> None:
    process = TemplateProcess({"source": _guarded(source)}, "the chat template x.jinja", _LIMIT_SECONDS)
    templates.append(process)
    with pytest.raises(InvalidField) as refused:
        process.render(_HOSTILE)
    assert refused.value.message.startswith("the chat template x.jinja ")
    assert len(refused.value.message) < 5000
    assert process.pid != os.getpid()
    assert process.render(_PLAIN) == "fine"


def test_killed_template_process_fails_its_rendering_and_is_replaced(templates: list[TemplateProcess]) -> None:
    process = TemplateProcess({"source": _guarded(_SHARED + "{{ ns.a == ns.b }}")}, "the chat template")
    templates.append(process)
    assert process.render(_PLAIN) == "fine"
    process.begin(_HOSTILE)
    os.kill(process.pid, signal.SIGSEGV)
    assert process.has_ended(30)
    with pytest.raises(InvalidField, match="the chat template ended its process with status -11"):
        process.take()
    assert process.render(_PLAIN) == "fine"


def test_renderings_are_done_in_order_and_can_be_withdrawn(templates: list[TemplateProcess]) -> None:
    process = TemplateProcess({"source": _guarded(_SHARED + "{{ ns.a == ns.b }}")}, "the chat template", _LIMIT_SECONDS)
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


@pytest.mark.parametrize(("source", "reason"), [("{% if %}", "cannot be used"), ("{{ 1 // 0 }}", "ZeroDivisionError")])
def test_invalid_template_is_the_error_of_each_request(
    source: str, reason: str, templates: list[TemplateProcess]
) -> None:
    process = TemplateProcess({"source": source}, "the chat template x.jinja")
    templates.append(process)
    for _ in range(2):
        with pytest.raises(InvalidField, match=rf"the chat template x\.jinja .*{reason}"):
            process.render(_PLAIN)
