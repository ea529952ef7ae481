"""Requests that are sent as ``multipart/form-data``: fields as a JSON document, and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ovmstrio.core.errors import InvalidField
from ovmstrio.protocols.openai.api import model_name
from ovmstrio.serving.ovms_errors import decompressed_body

if TYPE_CHECKING:
    from ovmstrio.core.http_messages import HttpRequest
    from ovmstrio.protocols.openai.api import OpenAIApi
    from ovmstrio.protocols.openai.known_fields import KnownFields

_MULTIPART: Final = "multipart/form-data"
_MAX_PARTS: Final = 64
_MAX_INLINE_BYTES: Final = 2**18
_MAX_NUMBER_CHARACTERS: Final = 64
_FLAGS: Final = {"true": True, "false": False}


class Form(NamedTuple):
    """Parsed form: fields as a JSON document, files by name, and the model."""

    document: Mapping[str, Any]
    files: Mapping[str, bytes]
    model: str


class FormReader(NamedTuple):
    """Parser of the forms of an endpoint.

    Attributes:
        known: fields of the endpoint, files included.
        file: name of the required file.
        noun: the required file in errors, such as ``recording``.
        texts: fields that are texts, whatever they look like.
        numbers: fields that are numbers, with their type.
        lists: fields that may occur several times.
    """

    known: KnownFields
    file: str
    noun: str
    texts: frozenset[str]
    numbers: Mapping[str, Callable[[str], float]]
    lists: frozenset[str] = frozenset()

    async def read(self, api: OpenAIApi, request: HttpRequest) -> Form:
        """Parse a form; raise ``InvalidField``, ``MalformedPayload`` or ``PayloadTooLarge``."""
        kind = request.header("content-type") or ""
        if not kind.lower().startswith(_MULTIPART):
            message = f"expected the {self.noun} as part {self.file!r} of {_MULTIPART}"
            raise InvalidField(message, field="content-type", got=repr(kind[:80]))
        body = await decompressed_body(request, api.max_body_bytes)
        read = partial(self._read_parts, kind, body)
        document, files = read() if len(body) <= _MAX_INLINE_BYTES else await trio.to_thread.run_sync(read)
        if api.form.ignores_unknown_fields:
            document = self.known.without_unknown(document)
        model = model_name(document)
        if self.file not in files:
            hint = f"send the {self.noun} as a part of this name, with a filename"
            message = f"{self.file} is missing in request: {hint}"
            raise InvalidField(message, field=self.file, code="missing_required_parameter")
        return Form(document, files, model)

    def _read_parts(self, kind: str, body: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
        from ovmstrio.encoding.multipart import form_parts  # noqa: PLC0415 - loads a framework, only for forms

        document: dict[str, Any] = {}
        files: dict[str, bytes] = {}
        for part in form_parts(kind, body, limit=_MAX_PARTS):
            name = part.name.removesuffix("[]")
            if part.filename is not None:
                if name in files:
                    raise InvalidField(f"{name}: expected one file", field=name, got="several")
                files[name] = part.content
                if name not in self.known.used:
                    document[name] = "a file"  # refused later
            elif name in self.lists:
                document.setdefault(name, []).append(part.text)
            elif part.text:
                document[name] = self._value(name, part.text)
        return document, files

    def _value(self, name: str, text: str) -> Any:
        """Return a form field as a JSON value; invalid text is kept and refused later."""
        if name in self.texts:
            return text
        if name in self.numbers:
            try:
                return self.numbers[name](text) if len(text) <= _MAX_NUMBER_CHARACTERS else text
            except ValueError:
                return text
        return _FLAGS.get(text.lower(), text)
