"""Chat templates: prompts of conversations, made in a sandbox, with bounds on work and size."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ovmstrio.util.regular_files import read_regular_bytes, read_regular_text

__all__ = [
    "ChatTemplate",
    "Raised",
    "TemplateEnvironment",
    "TemplateFailure",
    "TemplateSource",
    "TooMuchWork",
    "Work",
    "read_template",
    "read_template_source",
    "with_generic_tools",
]

# ----------------------------------------------------------------------
# Bounds on what a chat template may do, counted and never timed, so that one that loops ends alike everywhere
# ----------------------------------------------------------------------

_STEPS: Final = 20_000
_STEPS_FOR_VALUE: Final = 100
_LETTERS: Final = 4_000_000
_LETTERS_FOR_LETTER: Final = 64
_LETTERS_FOR_VALUE: Final = 1000
_READ_FOR_ONE: Final = 16
_MOST: Final = 100_000
_MOST_BITS: Final = 4096
_WIDTH: Final = re.compile(r"\d{6}|%[^a-zA-Z%]*\*")


class TooMuchWork(Exception):
    """A template went beyond its bounds; the text says which."""


class Work:
    """What one rendering has left of its bounds, which grow with what it is given.

    Args:
        values: how many values the conversation and its tools have, nested ones included.
        letters: how long their texts are together.
    """

    def __init__(self, values: int, letters: int) -> None:
        self._steps = _STEPS + _STEPS_FOR_VALUE * values
        self._letters = _LETTERS + _LETTERS_FOR_LETTER * letters + _LETTERS_FOR_VALUE * values

    def step(self, letters: int) -> str:
        """Count a turn of a loop or a call of a macro, whose own text has so many letters.

        Raises:
            TooMuchWork: there were too many.
        """
        self._steps -= 1
        if self._steps < 0:
            raise TooMuchWork("it loops for too long")
        self.room(letters)
        return ""

    def room(self, size: int) -> None:
        """Count so many letters or items that are made.

        Raises:
            TooMuchWork: they are too many.
        """
        self._letters -= max(size, 0)
        if self._letters < 0:
            raise TooMuchWork("what it makes is too large")

    def made(self, value: Any) -> Any:
        """Count what was made, and give it.

        Raises:
            TooMuchWork: it is too large, with all that was made before.
        """
        if isinstance(value, str | list | tuple | dict):
            self.room(len(value))
        return value

    def operator(self, operator: str, left: Any, right: Any) -> None:
        """Refuse what would be too large before it is made.

        Raises:
            TooMuchWork: it would.
        """
        if operator == "%" and isinstance(left, str):
            self._formatted(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MOST_BITS:
                raise TooMuchWork("it computes with numbers that are too large")
        elif operator == "*":
            self.room(_size(left) * _size(right))

    def call(self, name: str, subject: Any, arguments: tuple[Any, ...]) -> None:
        """Refuse a filter, or a method of a text, whose result may be beyond the bounds; count what it reads.

        Raises:
            TooMuchWork: it may.
        """
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > _MOST:
                raise TooMuchWork(f"it asks for {argument} of something, where {_MOST} are the most")
        if name == "join" and arguments:
            self.room(_size(subject) * _size(arguments[0]))
        if not isinstance(subject, str):
            return
        self.room(len(subject) // _READ_FOR_ONE)
        if name in {"format", "format_map"}:
            self._formatted(subject)
        elif name == "indent":
            self.room((subject.count("\n") + 1) * max((_size(argument) for argument in arguments), default=0))
        elif name == "translate":
            raise TooMuchWork("it translates letters, which has no bound")
        elif name == "replace" and len(arguments) > 1 and isinstance(arguments[0], str):
            self.room(subject.count(arguments[0]) * _size(arguments[1]))

    @staticmethod
    def _formatted(text: str) -> None:
        if _WIDTH.search(text):
            raise TooMuchWork("it formats with a width that has no bound")


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, Sized) else 1


# ----------------------------------------------------------------------
# Jinja2 as chat templates expect it: the sandbox and names that Hugging Face's have, and a count of what is done
# ----------------------------------------------------------------------

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


# ----------------------------------------------------------------------
# Tools for templates that know none: explained in a message, with calls and their results as texts
# ----------------------------------------------------------------------

_EXPLAINED: Final = (
    "These functions can be called:\n{tools}\n\nTo call some of them, answer with nothing but JSON of this form:\n"
    '{{"tool_calls": [{{"name": "<name>", "arguments": {{"<parameter>": "<value>"}}}}]}}\n'
    "The results come in the next message. Where no function is needed, answer in words."
)


def with_generic_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Give messages whose texts tell of calls and functions, without the fields that this template does not know."""
    told = [_told(message) for message in messages]
    if not tools:
        return told
    explained = _EXPLAINED.format(tools="\n".join(_json(tool.get("function", tool)) for tool in tools))
    if told and told[0].get("role") == "system":
        first = {**told[0], "content": f"{told[0]['content']}\n\n{explained}"}
        return [first, *told[1:]]
    return [{"role": "system", "content": explained}, *told]


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    told = dict(message)
    calls = told.pop("tool_calls", None)
    if calls:
        functions = [call.get("function", {}) for call in calls]
        wanted = [{"name": one.get("name"), "arguments": one.get("arguments")} for one in functions]
        text = _json({"tool_calls": wanted})
        told["content"] = f"{told['content']}\n{text}" if told.get("content") else text
    if told.get("role") == "tool":
        name = told.get("name") or told.get("tool_call_id") or "function"
        return {"role": "user", "content": f"Result of {name}:\n{told.get('content', '')}"}
    return told


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ----------------------------------------------------------------------
# Chat templates: prompts of conversations, made in a sandbox, with bounds on work and size
# ----------------------------------------------------------------------

_FILE: Final = "<template>"
_SETTINGS: Final = "tokenizer_config.json"
_MOST_SOURCE: Final = 1 << 20
_MOST_TEXT: Final = 4096


class TemplateFailure(Exception):
    """A template cannot be used, or does not take a conversation; ``line`` counts from 1, 0 where there is none."""

    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {text}" if line else text)
        self.text = text
        self.line = line


class ChatTemplate:
    """Makes prompts of conversations, one at a time.

    Args:
        source: in Jinja2's language, as Hugging Face's tokenizers have it.
        bos_token: begins a text; empty where there is none.
        eos_token: ends one.
        extras: more variables, such as ``pad_token``.
        tool_source: the template of conversations with tools, where it is another one.
        now: gives the time for templates that write the date.

    Raises:
        TemplateFailure: a source is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        extras: Mapping[str, Any] | None = None,
        tool_source: str = "",
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        self.source: Final = source
        self.tool_source: Final = tool_source or source
        self._variables: Final = {**(extras or {}), "bos_token": bos_token, "eos_token": eos_token}
        self._environment: Final = TemplateEnvironment(now)
        self._plain: Final = self._compiled(source)
        self._with_tools: Final = self._compiled(tool_source) if tool_source else self._plain

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,  # noqa: FBT002 -- as templates name it
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Make the prompt of a conversation.

        Args:
            messages: in OpenAI's form; arguments of calls are given to the template as objects.
            tools: in OpenAI's form; a template that knows none gets a message that explains them.
            add_generation_prompt: whether the prompt ends with the begin of an answer.
            options: more variables, such as ``enable_thinking``; ``add_generation_prompt`` of these wins.

        Raises:
            TemplateFailure: the template refuses the conversation, fails, or works for too long.
        """
        prepared = [_prepared(message) for message in messages]
        given = [dict(tool) for tool in tools]
        if "tools" not in self.tool_source:
            prepared, given = with_generic_tools(prepared, given), []
        variables = {
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
            **(options or {}),
            "messages": prepared,
            "tools": given or None,
            "documents": None,
        }
        self._environment.work = work = Work(*_counted(variables))
        parts: list[str] = []
        try:
            for part in (self._with_tools if given else self._plain).generate(variables):
                work.room(len(part))
                parts.append(part)
        except Exception as error:
            raise _failure(error) from error
        return "".join(parts)

    def _compiled(self, source: str) -> Any:
        if len(source) > _MOST_SOURCE:
            raise TemplateFailure(f"the template has {len(source)} letters, where {_MOST_SOURCE} are the most")
        self._environment.work = Work(0, 0)
        try:
            return self._environment.from_string(source)
        except Exception as error:
            raise _failure(error) from error


class TemplateSource(NamedTuple):
    """A template that was read: arguments of :class:`ChatTemplate`, and the file; empty for the tokenizer's own."""

    arguments: dict[str, Any]
    file: str


def read_template(folder: Path, source: str = "", *, bos_token: str = "", eos_token: str = "") -> ChatTemplate | None:
    """Read the template of a model's folder and compile it; see :func:`read_template_source`."""
    found = read_template_source(folder, source, bos_token=bos_token, eos_token=eos_token)
    return None if found is None else ChatTemplate(**found.arguments)


def read_template_source(
    folder: Path, source: str = "", *, bos_token: str = "", eos_token: str = ""
) -> TemplateSource | None:
    """Read the template of a model's folder; None if it has none.

    Args:
        folder: with ``chat_template.jinja``, or ``tokenizer_config.json``, which also tells the special tokens.
        source: the template where the folder has none, such as the tokenizer's own.
        bos_token: where the folder has none, likewise.
        eos_token: likewise.

    Raises:
        TemplateFailure: a file is no JSON.
        OSError: a file cannot be read.
    """
    settings = _read_json(folder / _SETTINGS)
    tokens = {**_read_json(folder / "special_tokens_map.json"), **settings}
    variables = {key: _token(value) for key, value in tokens.items() if key.endswith("_token") and _token(value)}
    named = settings.get("chat_template")
    sources = {"default": named} if isinstance(named, str) else {}
    name = _SETTINGS
    if isinstance(named, list):
        sources = {str(one.get("name")): str(one.get("template")) for one in named if isinstance(one, dict)}
    file = folder / "chat_template.jinja"
    if file.is_file():
        sources, name = {"default": read_regular_text(file)}, file.name
    found = sources.get("default") or source or next(iter(sources.values()), "")
    if not found:
        return None
    if found not in sources.values():
        name = ""
    extras = {key: value for key, value in variables.items() if key not in {"bos_token", "eos_token"}}
    arguments = {
        "source": found,
        "bos_token": variables.get("bos_token", bos_token),
        "eos_token": variables.get("eos_token", eos_token),
        "extras": extras,
        "tool_source": sources.get("tool_use", ""),
    }
    return TemplateSource(arguments, name)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_regular_bytes(file))
    except ValueError as error:
        raise TemplateFailure(f"{file.name}: {error}") from error
    return found if isinstance(found, dict) else {}


def _token(value: Any) -> str:
    """Give a special token, which is a text or an object with its ``content``."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Give a message as templates take it: content is a text, and arguments of calls are objects."""
    prepared = {**message, "content": message.get("content") if message.get("content") is not None else ""}
    calls = prepared.pop("tool_calls", None)
    if calls:
        prepared["tool_calls"] = [_call(call) for call in calls]
    return prepared


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        function["arguments"] = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": function}


def _counted(value: Any) -> tuple[int, int]:
    """Give how many values there are in one, and the length of their texts."""
    values, letters, left = 0, 0, [value]
    while left:
        one = left.pop()
        values += 1
        if isinstance(one, str):
            letters += len(one)
        elif isinstance(one, dict):
            left.extend(one.values())
            letters += sum(len(key) for key in one if isinstance(key, str))
        elif isinstance(one, list | tuple):
            left.extend(one)
    return values, letters


def _failure(error: Exception) -> TemplateFailure:
    if isinstance(error, TemplateSyntaxError):
        return TemplateFailure(f"{error.message}"[:_MOST_TEXT], error.lineno)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    line = (lines[-1] if lines else 0) or 0
    if isinstance(error, RecursionError):
        return TemplateFailure("it calls itself too deeply", line)
    if isinstance(error, MemoryError):
        return TemplateFailure("it needs more memory than it may have", line)
    known = isinstance(error, TemplateError | TooMuchWork)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return TemplateFailure(text[:_MOST_TEXT] or type(error).__name__, line)
