"""Jinja2 as chat templates expect it: the sandbox and names that Hugging Face's have, and a count of what is done."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Any, Final, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ovmstrio.openvino.engine.template_work import Work

__all__ = ["Raised", "TemplateEnvironment"]

_MOST_INDENT: Final = 16


class Raised(TemplateError):
    """A template called ``raise_exception``."""


class _GenerationTag(Extension):
    """``{% generation %}``, which marks what a model is trained on, and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 -- as the class above declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Give what is between the tags, with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Counting(NodeTransformer):
    """Puts a count into each loop and macro, and makes joined texts a call, which is counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 -- named for the node
        """Count turns."""
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802 -- as above
        """Count calls."""
        return self._counted(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802 -- as above
        """Count calls."""
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 -- as above
        """Make ``a ~ b`` a call."""
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None, lineno=node.lineno)

    def _counted(self, node: Any) -> nodes.Node:
        letters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        counter = nodes.EnvironmentAttribute("step")
        call = nodes.Call(counter, [nodes.Const(letters)], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that count their work in ``work``, which is set anew for each rendering.

    Args:
        now: gives the time for ``strftime_now``.
    """

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._printed,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.work = Work(0, 0)
        self.step: Final = self._step
        self._now: Final = now
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._bounded("tojson", _to_json)
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": self._time}

    def joined(self, *parts: Any) -> str:
        """Give what ``~`` makes of its parts."""
        texts = [part if isinstance(part, str) else str(part) for part in parts]
        self.work.room(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method, as the sandbox allows it."""
        if function is self.step:
            return self.work.step(*args)
        # The sandbox wraps the formatting methods of texts.
        subject = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if subject is not self:
            self.work.call(getattr(function, "__name__", ""), subject, (*args, *kwargs.values()))
        return self.work.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute, where the result has a bound."""
        self.work.operator(operator, left, right)
        return self.work.made(super().call_binop(context, operator, left, right))

    def _step(self, letters: int) -> str:
        return self.work.step(letters)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        parsed.set_environment(self)
        return parsed

    def _printed(self, value: Any) -> Any:
        return self.work.made(value if isinstance(value, str) else str(value))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            passed = 1 if hasattr(function, "jinja_pass_arg") else 0
            subject = args[passed] if len(args) > passed else None
            self.work.call(name, subject, (*args[passed + 1 :], *kwargs.values()))
            return self.work.made(function(*args, **kwargs))

        return bounded

    def _time(self, form: str) -> str:
        return self._now().strftime(form)


def _raise(message: Any = "") -> NoReturn:
    raise Raised(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT002 -- as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT002 -- as above
) -> str:
    width = min(indent, _MOST_INDENT) if isinstance(indent, int) else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys)
