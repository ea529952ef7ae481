"""Callers file: API key hashes, certificate names and token subjects, with scopes and quotas.

::

 {"callers": [
   {"name": "shop", "sha256": "9f86...", "scopes": ["infer:resnet*"], "requests_per_second": 50, "concurrency": 8},
   {"name": "node-7", "certificate": "node-7.example", "scopes": ["metrics"]},
   {"name": "ci", "subject": "repo:shop/app", "scopes": ["read", "admin"]}
 ]}

A key has 256 random bits, so that a plain hash is safe.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from ovmstrio.config.documents import Findings, Located, load_document, sorted_by_line
from ovmstrio.config.schema import OPTIONAL, Schema, check_members, list_items
from ovmstrio.core.callers import Scopes
from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.util.file_updates import replace_text
from ovmstrio.util.regular_files import read_regular_bytes

_PREFIX: Final = "ovms_"
_RANDOM_BYTES: Final = 32
_NAME: Final = re.compile(r"[\w.@:/-]{1,128}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_CREDENTIALS: Final = ("sha256", "certificate", "subject")


@dataclass(frozen=True, slots=True)
class CallerEntry:
    """One caller of the file.

    Attributes:
        sha256: hexadecimal hash of the API key, or empty.
        certificate: common name or alternative name of the client certificate, or empty.
        subject: ``sub`` of tokens, or empty.
        expires: first day (UTC) on which the caller is invalid; empty for never.
    """

    name: str
    scopes: Scopes
    sha256: str = ""
    certificate: str = ""
    subject: str = ""
    requests_per_second: float = 0
    concurrency: int = 0
    created: str = ""
    expires: str = ""
    tokens_per_minute: int = 0

    @property
    def proof(self) -> str:
        """Type of the credential."""
        return "certificate" if self.certificate else "token" if self.subject else "key"

    @property
    def expires_at(self) -> float:
        """Expiry in seconds since the epoch; infinite for never."""
        return datetime.fromisoformat(self.expires).replace(tzinfo=UTC).timestamp() if self.expires else float("inf")

    def document(self) -> dict[str, Any]:
        """Return the JSON entry without empty fields."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name != "scopes"}
        return {name: value for name, value in fields.items() if value} | {"scopes": list(self.scopes.texts())}


class _File(Schema):
    callers: list[Any]


class _Entry(Schema):
    name: str
    scopes: list[str]
    sha256: str = OPTIONAL
    certificate: str = OPTIONAL
    subject: str = OPTIONAL
    requests_per_second: Annotated[float, Field(ge=0)] = OPTIONAL
    concurrency: Annotated[int, Field(ge=0)] = OPTIONAL
    tokens_per_minute: Annotated[int, Field(ge=0)] = OPTIONAL
    created: str = OPTIONAL
    expires: str = OPTIONAL


def new_key() -> str:
    """Return a new random API key."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def key_hash(secret: str) -> str:
    """Return the hash of an API key."""
    return sha256(secret.encode()).hexdigest()


def read_key_file(path: Path) -> list[CallerEntry]:
    """Read a callers file; blocking.

    Raises:
        ConfigError: the file is unreadable or invalid, with all problems.
    """
    try:
        content = read_regular_bytes(path)
    except OSError as error:
        problem = Problem(f"callers file not readable: {error.strerror or error}", str(path))
        raise ConfigError([problem]) from None
    return parse_callers(content, str(path))


def parse_callers(content: bytes, file: str) -> list[CallerEntry]:
    """Parse the content of a callers file; raises ConfigError if invalid, with all problems."""
    document = load_document(content, file)
    findings = Findings(file)
    findings.refuse_repeated(document)
    items = list_items(check_members(document.root, _File, findings), "callers")
    entries = [entry for entry in (_read_entry(item, findings) for item in items) if entry is not None]
    for what in ("name", *_CREDENTIALS):
        _refuse_duplicates(what, items, findings)
    if findings.fatal:
        raise ConfigError(sorted_by_line(findings.fatal))
    return entries


def _read_entry(node: Located, findings: Findings) -> CallerEntry | None:
    known = len(findings.fatal)
    members = {key: member.plain() for key, member in check_members(node, _Entry, findings).items()}
    if len(findings.fatal) > known:
        return None
    if sum(bool(members.get(proof)) for proof in _CREDENTIALS) != 1:
        findings.refuse(node, "expected exactly one credential", expected=f"one of {', '.join(_CREDENTIALS)}")
    if not _NAME.fullmatch(members["name"]):
        findings.refuse(node.find("name"), "invalid name", expected="letters, digits and . _ @ : / - (128 at most)")
    if members.get("sha256") and not _DIGEST.fullmatch(members["sha256"]):
        # The value is not shown, as it may be the key itself.
        findings.refuse(node.find("sha256"), "invalid hash", expected="64 lower-case hexadecimal digits")
    if members.get("expires") and not _is_day(members["expires"]):
        findings.refuse(node.find("expires"), "invalid date", expected="YYYY-MM-DD", found=members["expires"])
    try:
        members["scopes"] = Scopes.parse(members["scopes"])
    except ValueError as error:
        findings.refuse(node.find("scopes"), str(error))
    return CallerEntry(**members) if len(findings.fatal) == known else None


def _is_day(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).date().isoformat() == text
    except ValueError:
        return False


def _refuse_duplicates(what: str, items: Sequence[Located], findings: Findings) -> None:
    seen: set[Any] = set()
    for item in items:
        node = item.find(what)
        value = node.plain() if what in item.members else None
        if isinstance(value, str) and value in seen:
            findings.refuse(node, f"duplicate {what}", suggestion="remove one of them")
        elif isinstance(value, str):
            seen.add(value)


def write_key_file(path: Path, entries: Sequence[CallerEntry]) -> None:
    """Write the file, readable by its owner only if new; blocking.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({"callers": [entry.document() for entry in entries]}, indent=2, ensure_ascii=False) + "\n"
    replace_text(path, text, new_mode=0o600)
