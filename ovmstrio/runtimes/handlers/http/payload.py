"""The body of a request, parsed as its content type says."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from ovmstrio.core.errors import MalformedPayload
from ovmstrio.runtimes.handlers.http.forms import multipart_form, urlencoded_form

__all__ = ["parse_payload"]

_CHARSET: Final = re.compile(r"charset=\s*[\"']?([^\s;\"']+)")
_DEFAULT_CHARSET: Final = "utf-8"


def parse_payload(content_type: str | None, body: bytes) -> Any:
    """Give what a handler gets as ``payload``.

    ===================================== ==========================================
    content type begins with              payload
    ===================================== ==========================================
    ``application/json``                  any JSON value; ``NaN`` and infinities, too
    ``text/plain``                        text, in UTF-8 or the ``charset`` given
    ``multipart/form``                    a form of text and uploaded files
    ``application/x-www-form-urlencoded`` a form of text
    anything else, or nothing             the bytes
    ===================================== ==========================================

    Raises:
        MalformedPayload: the body is not what its content type says.
    """
    given = content_type or ""
    kind = given.lower()
    if kind.startswith("application/json"):
        return _parsed_json(body)
    if kind.startswith("text/plain"):
        return _decoded(kind, body)
    if kind.startswith("multipart/form"):
        return multipart_form(given, body)
    if kind.startswith("application/x-www-form-urlencoded"):
        return urlencoded_form(body)
    return body


def _parsed_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise MalformedPayload(str(error), is_json=True) from error
    except RecursionError as error:
        raise MalformedPayload("the JSON is nested too deeply", is_json=True) from error


def _decoded(kind: str, body: bytes) -> str:
    charsets = _CHARSET.findall(kind)
    charset = charsets[-1] if charsets else _DEFAULT_CHARSET
    try:
        return body.decode(charset)
    except (LookupError, ValueError) as error:
        raise MalformedPayload(f"the text is not in {charset}: {error}") from error
