"""Chat templates: prompts of conversations, made in a sandbox, with bounds on work and size."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from jinja2.exceptions import TemplateError, TemplateSyntaxError

from ovmstrio.openvino.engine.generic_tools import with_generic_tools
from ovmstrio.openvino.engine.template_environment import TemplateEnvironment
from ovmstrio.openvino.engine.template_work import TooMuchWork, Work
from ovmstrio.util.regular_files import read_regular_bytes, read_regular_text

__all__ = ["ChatTemplate", "TemplateFailure", "TemplateSource", "read_template", "read_template_source"]

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
    settings = _json(folder / _SETTINGS)
    tokens = {**_json(folder / "special_tokens_map.json"), **settings}
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


def _json(file: Path) -> dict[str, Any]:
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
