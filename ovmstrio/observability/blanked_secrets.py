"""What was sent, without what looks like a secret: for who has asked to see it.

Values are blanked whose names say that they are secret, in JSON, in forms and in headers, and texts that look like
keys and tokens wherever they stand.  A text that nothing tells from others stays.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["blanked"]

_BLANK: Final = b"***"
_LEAST_KNOWN: Final = 4
"""Bytes of a header's value for which it is looked for elsewhere."""
_TOKENS: Final = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[{]|[\]}]|:|,|[^\s"\[\]{}:,]+|\s+', re.DOTALL)
"""Of JSON, also of what is cut, and of anything else."""
_SECRET: Final = re.compile(
    rb"secret|passw|token|api.?key|authori[sz]ation|credential|private|cookie|bearer", re.IGNORECASE
)
_COUNTED: Final = re.compile(rb"token", re.IGNORECASE)
"""Numbers under such names count something."""
_PAIRS: Final = re.compile(
    rb"([\w.-]{0,64}(?:secret|passw|token|api_?key|credential)[\w.-]{0,64}=)[^&\s]+", re.IGNORECASE
)
_PARTS: Final = re.compile(
    rb'(name="[^"\r\n]{0,64}(?:secret|passw|token|api_?key|credential)[^"\r\n]{0,64}"\r\n\r\n)[^\r\n]+', re.IGNORECASE
)
_KEYS: Final = re.compile(
    rb"(?:\b(?:ovms_|sk-|hf_|gh[pousr]_|xox[abps]-)[\w-]{12,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    rb"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?<=Bearer )[^\s\"']+|(?<=://)[^/\s@\"]{1,256}(?=@))"
)


def blanked(data: bytes, headers: Iterable[tuple[str, str]] = ()) -> str:
    """Give bytes as a text without secrets; what is no UTF-8 is escaped.

    Args:
        data: the begin of what was sent.
        headers: it came with, in small letters; what these show is blanked wherever it stands.
    """
    for name, value in headers:
        if _SECRET.search(name.encode("latin-1", "replace")):
            for shown in {value, value.partition(" ")[2].strip()}:
                if len(shown) >= _LEAST_KNOWN:
                    data = data.replace(shown.encode("latin-1", "replace"), _BLANK)
    data = b"".join(_without_named(data))
    for pattern in (_PAIRS, _PARTS):
        data = pattern.sub(rb"\1" + _BLANK, data)
    return _KEYS.sub(_BLANK, data).decode("utf-8", "backslashreplace")


def _without_named(data: bytes) -> Iterator[bytes]:
    """Blank the values of names that say so, with all that is in them."""
    name = last = b""
    depth = 0
    for match in _TOKENS.finditer(data):
        token = match[0]
        if token.isspace():
            yield token
            continue
        is_value = last == b":" and _SECRET.search(name) is not None
        if depth:
            depth += token in {b"[", b"{"}
            depth -= token in {b"]", b"}"}
            yield _blank(token) if token[:1] == b'"' else token
        elif is_value and token in {b"[", b"{"}:
            depth = 1
            yield token
        elif is_value and (token[:1] == b'"' or _COUNTED.search(name) is None):
            yield _blank(token)
        else:
            yield token
        if token[:1] == b'"' and last != b":":
            name = token
        last = token


def _blank(token: bytes) -> bytes:
    return b'"%b"' % _BLANK if token[:1] == b'"' else _BLANK
