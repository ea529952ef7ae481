"""Chat templates: Jinja2 in a sandbox with limits on work and output size."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from functools import cached_property, wraps
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

# ----------------------------------------------------------------------
# Budget
# ----------------------------------------------------------------------

_STEPS: Final = 20_000
_STEPS_PER_VALUE: Final = 100
_CHARACTERS: Final = 4_000_000
_CHARACTERS_PER_CHARACTER: Final = 64
_CHARACTERS_PER_VALUE: Final = 1000
_CHARACTERS_READ_PER_CHARACTER: Final = 16
_MAX_ARGUMENT: Final = 100_000
_MAX_INTEGER_BITS: Final = 4096
_WIDTH: Final = re.compile(r"\d{6}|%[^a-zA-Z%]*\*")


class TemplateBudgetExceeded(Exception):
    """A template exceeded its budget; the message names the limit."""


class TemplateBudget:
    """Budget of one rendering, for ``values`` nested values with texts of ``characters`` characters."""

    def __init__(self, values: int, characters: int) -> None:
        self._steps = _STEPS + _STEPS_PER_VALUE * values
        self._characters = _CHARACTERS + _CHARACTERS_PER_CHARACTER * characters + _CHARACTERS_PER_VALUE * values

    def step(self, characters: int) -> str:
        """Count a loop iteration or macro call whose own text has ``characters`` characters."""
        self._steps -= 1
        if self._steps < 0:
            raise TemplateBudgetExceeded("too many loop iterations")
        self.room(characters)
        return ""

    def room(self, size: int) -> None:
        """Count characters or items that are created."""
        self._characters -= max(size, 0)
        if self._characters < 0:
            raise TemplateBudgetExceeded("output too large")

    def made(self, value: Any) -> Any:
        """Count a created value and return it."""
        if isinstance(value, str | list | tuple | dict):
            self.room(len(value))
        return value

    def operator(self, operator: str, left: Any, right: Any) -> None:
        """Reject an operation whose result would be too large."""
        if operator == "%" and isinstance(left, str):
            self._formatted(left)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INTEGER_BITS:
                raise TemplateBudgetExceeded("integer too large")
        elif operator == "*":
            self.room(_size(left) * _size(right))

    def call(self, name: str, subject: Any, arguments: tuple[Any, ...]) -> None:
        """Reject a filter or text method whose result may be too large; count the text that it reads."""
        for argument in arguments:
            if isinstance(argument, int) and abs(argument) > _MAX_ARGUMENT:
                raise TemplateBudgetExceeded(f"argument {argument} exceeds {_MAX_ARGUMENT}")
        if name == "join" and arguments:
            self.room(_size(subject) * _size(arguments[0]))
        if not isinstance(subject, str):
            return
        self.room(len(subject) // _CHARACTERS_READ_PER_CHARACTER)
        if name in {"format", "format_map"}:
            self._formatted(subject)
        elif name == "indent":
            self.room((subject.count("\n") + 1) * max((_size(argument) for argument in arguments), default=0))
        elif name == "translate":
            raise TemplateBudgetExceeded("translate is not allowed")
        elif name == "replace" and len(arguments) > 1 and isinstance(arguments[0], str):
            self.room(subject.count(arguments[0]) * _size(arguments[1]))

    @staticmethod
    def _formatted(text: str) -> None:
        if _WIDTH.search(text):
            raise TemplateBudgetExceeded("format width too large")


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if isinstance(value, Sized) else 1


# ----------------------------------------------------------------------
# Sandboxed Jinja2 with the names of Hugging Face's environment
# ----------------------------------------------------------------------

_MAX_INDENT: Final = 16


class TemplateRaised(TemplateError):
    """The template called ``raise_exception``."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks training data in Hugging Face's templates; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012 -- as the class above declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _StepCounter(NodeTransformer):
    """Inserts a step count into loops and macros, and turns ``a ~ b`` into a counted call."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 -- named for the node
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None, lineno=node.lineno)

    def _counted(self, node: Any) -> nodes.Node:
        characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        counter = nodes.EnvironmentAttribute("step")
        call = nodes.Call(counter, [nodes.Const(characters)], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = _counted  # noqa: N815 -- named for the nodes


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja2 environment that charges all work to ``work``, which each rendering replaces."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            finalize=self._finalize,
            extensions=[LoopControlExtension, _GenerationTag],
        )
        self.work = TemplateBudget(0, 0)
        self.step: Final = self._step

        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters["tojson"] = self._bounded("tojson", _to_json)
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": lambda form: now().strftime(form)}

    def joined(self, *parts: Any) -> str:
        """Return the concatenation of ``parts``, for ``~``."""
        texts = [part if isinstance(part, str) else str(part) for part in parts]
        self.work.room(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method within the sandbox and the budget."""
        if function is self.step:
            return self.work.step(*args)
        # The sandbox wraps the format methods of str.
        subject = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if subject is not self:
            self.work.call(getattr(function, "__name__", ""), subject, (*args, *kwargs.values()))
        return self.work.made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation within the budget."""
        self.work.operator(operator, left, right)
        return self.work.made(super().call_binop(context, operator, left, right))

    def _step(self, characters: int) -> str:
        return self.work.step(characters)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _StepCounter().visit(super()._parse(source, name, filename))
        parsed.set_environment(self)
        return parsed

    def _finalize(self, value: Any) -> Any:
        return self.work.made(value if isinstance(value, str) else str(value))

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            passed = 1 if hasattr(function, "jinja_pass_arg") else 0
            subject = args[passed] if len(args) > passed else None
            self.work.call(name, subject, (*args[passed + 1 :], *kwargs.values()))
            return self.work.made(function(*args, **kwargs))

        return bounded


def _raise(message: Any = "") -> NoReturn:
    raise TemplateRaised(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT002 -- as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT002 -- as above
) -> str:
    width = min(indent, _MAX_INDENT) if isinstance(indent, int) else None
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys)


# ----------------------------------------------------------------------
# Tools for templates without tool support
# ----------------------------------------------------------------------

_TOOL_PROMPT: Final = (
    "These functions can be called:\n{tools}\n\nTo call some of them, answer with nothing but JSON of this form:\n"
    '{{"tool_calls": [{{"name": "<name>", "arguments": {{"<parameter>": "<value>"}}}}]}}\n'
    "The results come in the next message. Where no function is needed, answer in words."
)


def tools_as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with tools, calls and results written as text, for a template without tool support."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    explained = _TOOL_PROMPT.format(tools="\n".join(_json(tool.get("function", tool)) for tool in tools))
    if plain and plain[0].get("role") == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{explained}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": explained}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(message)
    calls = plain.pop("tool_calls", None)
    if calls:
        functions = [call.get("function", {}) for call in calls]
        wanted = [{"name": one.get("name"), "arguments": one.get("arguments")} for one in functions]
        text = _json({"tool_calls": wanted})
        plain["content"] = f"{plain['content']}\n{text}" if plain.get("content") else text
    if plain.get("role") == "tool":
        name = plain.get("name") or plain.get("tool_call_id") or "function"
        return {"role": "user", "content": f"Result of {name}:\n{plain.get('content', '')}"}
    return plain


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ----------------------------------------------------------------------
# Templates
# ----------------------------------------------------------------------

_FILE: Final = "<template>"
_SETTINGS: Final = "tokenizer_config.json"
_MAX_SOURCE_CHARACTERS: Final = 1 << 20
_MAX_ERROR_CHARACTERS: Final = 4096


class TemplateFailure(Exception):
    """A template is invalid or rejects a conversation; ``line`` counts from 1, 0 if unknown."""

    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(f"line {line}: {text}" if line else text)
        self.text = text
        self.line = line


_CONTENT: Final = "an ordinary text"


def _parts_of(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


class ChatTemplate:
    """Renders conversations to prompts; not thread-safe. TemplateFailure if a source is invalid.

    Args:
        source: Jinja2 source, as in Hugging Face's tokenizers.
        extras: more variables, such as ``pad_token``.
        tool_source: separate template for conversations with tools; empty if there is none.
        now: returns the time for templates that write the date.
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
        """Render the prompt of a conversation.

        Args:
            messages: in OpenAI's form; the template gets call arguments as objects.
            tools: in OpenAI's form; a template without tool support gets a message that explains them.
            add_generation_prompt: whether the prompt ends with the start of an answer.
            options: more variables, such as ``enable_thinking``; may override ``add_generation_prompt``.

        Raises:
            TemplateFailure: the template rejects the conversation, fails, or exceeds its budget.
        """
        prepared = [_prepared(message) for message in messages]
        if self._reads_parts:
            prepared = [{**each, "content": _parts_of(each["content"])} for each in prepared]
        given = [dict(tool) for tool in tools]
        if "tools" not in self.tool_source:
            prepared, given = tools_as_text(prepared, given), []
        variables = {
            "add_generation_prompt": add_generation_prompt,
            "documents": None,
            **self._variables,
            **(options or {}),
            "messages": prepared,
            "tools": given or None,
        }
        self._environment.work = work = TemplateBudget(*_counted(variables))
        parts: list[str] = []
        try:
            for part in (self._with_tools if given else self._plain).generate(variables):
                work.room(len(part))
                parts.append(part)
        except Exception as error:
            raise _failure(error) from error
        return "".join(parts)

    @cached_property
    def _reads_parts(self) -> bool:
        """True if the template reads the content of a message as a list of parts only."""
        outputs = []
        for content in (_CONTENT, _parts_of(_CONTENT)):
            self._environment.work = TemplateBudget(0, 0)
            variables = {**self._variables, "messages": [{"role": "user", "content": content}], "tools": None}
            try:
                outputs.append(self._plain.render(variables))
            except Exception:  # noqa: BLE001 - templates fail in any way
                outputs.append("")
        return _CONTENT not in outputs[0] and _CONTENT in outputs[1]

    def _compiled(self, source: str) -> Any:
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise TemplateFailure(f"template too long: {len(source)} characters, limit {_MAX_SOURCE_CHARACTERS}")
        self._environment.work = TemplateBudget(0, 0)
        try:
            return self._environment.from_string(source)
        except Exception as error:
            raise _failure(error) from error


class TemplateSource(NamedTuple):
    """Arguments of :class:`ChatTemplate` and the file they come from; empty for the tokenizer's own template."""

    arguments: dict[str, Any]
    file: str


def read_template_source(
    folder: Path, source: str = "", *, bos_token: str = "", eos_token: str = ""
) -> TemplateSource | None:
    """Read the template of a model's folder; None if it has none.

    ``source``, ``bos_token`` and ``eos_token`` are used where the folder has none, such as the tokenizer's own.

    Raises:
        TemplateFailure: a file is not valid JSON.
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
    """Return a special token, given as a string or as an object with ``content``."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
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
    """Return the number of nested values and the total length of their texts."""
    values, characters, left = 0, 0, [value]
    while left:
        one = left.pop()
        values += 1
        if isinstance(one, str):
            characters += len(one)
        elif isinstance(one, dict):
            left.extend(one.values())
            characters += sum(len(key) for key in one if isinstance(key, str))
        elif isinstance(one, list | tuple):
            left.extend(one)
    return values, characters


def _failure(error: Exception) -> TemplateFailure:
    if isinstance(error, TemplateSyntaxError):
        return TemplateFailure(f"{error.message}"[:_MAX_ERROR_CHARACTERS], error.lineno)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
    line = (lines[-1] if lines else 0) or 0
    if isinstance(error, RecursionError):
        return TemplateFailure("recursion too deep", line)
    if isinstance(error, MemoryError):
        return TemplateFailure("memory limit exceeded", line)
    known = isinstance(error, TemplateError | TemplateBudgetExceeded)
    text = str(error) if known else f"{type(error).__name__}: {error}"
    return TemplateFailure(text[:_MAX_ERROR_CHARACTERS] or type(error).__name__, line)
