"""``ovms keys``: the file of callers, made, listed and taken from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ovms_cli.all_commands import app
from ovmstrio.access.key_file import digest_of, read_key_file


def _keys(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def test_a_key_is_shown_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    """Alone on standard output, so that it can be taken from there; lists show how hashes begin."""
    file = tmp_path / "keys.json"
    limits = ("--concurrency", "2", "--tokens_per_minute", "1000")
    made = _keys("new", "shop", "--file", str(file), "--scope", "infer:a*", "--scope", "read", *limits)
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert key.startswith("ovms_")
    assert key not in file.read_text()
    (entry,) = read_key_file(file)
    assert (entry.sha256, entry.scopes.texts()) == (digest_of(key), ("infer:a*", "read"))
    assert (entry.concurrency, entry.tokens_per_minute) == (2, 1000)
    listed = json.loads(_keys("list", "--file", str(file), "--json").stdout)
    assert [(each["name"], each["sha256"]) for each in listed] == [("shop", entry.sha256[:8])]
    assert "infer:a*, read" in _keys("list", "--file", str(file)).stdout


def test_a_key_that_is_revoked_is_gone_and_others_stay(tmp_path: Path) -> None:
    """One who was never there is told so."""
    file = str(tmp_path / "keys.json")
    for name in ("shop", "node"):
        assert _keys("new", name, "--file", file).exit_code == 0
    assert _keys("revoke", "shop", "--file", file).exit_code == 0
    assert [entry.name for entry in read_key_file(Path(file))] == ["node"]
    again = _keys("revoke", "shop", "--file", file)
    assert (again.exit_code, "there is no caller 'shop'" in again.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("shop", "--scope", "write"), 64, "got 'write'"),
        (("shop", "--certificate", "a", "--subject", "b"), 64, "exclude each other"),
        (("a shop",), 1, "no such name"),
        (("shop", "--expires", "tomorrow"), 1, "no such day"),
        (("known",), 1, "there is a caller 'known' already"),
    ],
)
def test_what_cannot_be_is_refused_and_the_file_stays_as_it_was(
    tmp_path: Path, arguments: tuple[str, ...], code: int, told: str
) -> None:
    """Before anything is written."""
    file = tmp_path / "keys.json"
    assert _keys("new", "known", "--file", str(file)).exit_code == 0
    before = file.read_bytes()
    refused = _keys("new", *arguments, "--file", str(file))
    assert (refused.exit_code, told in refused.stderr) == (code, True), refused.stderr
    assert file.read_bytes() == before
