"""The results of fields that docs/openai_fields.md lists, for each endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.service.protocols.openai.servers import BRUSH, CHAT, EARS, VOICE, WORDS, service_of
from tests.unit.protocols.servers import Serving

_PAGE: Final = Path(__file__).parents[4] / "docs" / "openai_fields.md"
_TEXT: Final = "All endpoints that generate text"
_BODIES: Final[dict[str, dict[str, Any]]] = {
    "/chat/completions": {"model": CHAT, "messages": [{"role": "user", "content": "a"}]},
    "/completions": {"model": CHAT, "prompt": "a"},
    "/responses": {"model": CHAT, "input": "a"},
    "/embeddings": {"model": WORDS, "input": "a"},
    "/rerank": {"model": WORDS, "query": "a", "documents": ["a"]},
    "/score": {"model": WORDS, "text_1": "a", "text_2": "a"},
    "/pooling": {"model": WORDS, "input": "a"},
    "/tokenize": {"model": WORDS, "text": "a"},
    "/detokenize": {"model": WORDS, "tokens": [1]},
    "/audio/transcriptions": {"model": EARS},
    "/audio/speech": {"model": VOICE, "input": "a"},
    "/images/generations": {"model": BRUSH, "prompt": "a"},
}
_VALUES: Final[tuple[Any, ...]] = ([[5.5]], 5.5, {"x": 5.5}, "x", 1, True, {})
"""Values of all types; of a field that the server reads or checks, at least one is invalid."""


class _Row(NamedTuple):
    path: str
    result: str
    field: str
    accepted: str


def _rows() -> Iterator[_Row]:
    for section in _PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, rest = section.partition("\n")
        paths = list(_BODIES)[:3] if title == _TEXT else [title.split()[0]]
        for result, fields in re.findall(r"^\| (works|no effect|refused[^|]*) \| ([^|]*) \|", rest, re.MULTILINE):
            accepted = result.partition("except `")[2].removesuffix("`")
            for name in re.findall(r"`(\w+)`(?=,| \||$| \()", fields):
                yield from (_Row(path, result.partition(",")[0], name, accepted) for path in paths)


ROWS: Final = list(_rows())


async def _post(serving: Serving, path: str, **fields: Any) -> Any:
    body = _BODIES[path] | fields
    if path != "/audio/transcriptions":
        return await serving.post(f"/v3{path}", json=body)
    form = {name: value if isinstance(value, str) else json.dumps(value) for name, value in body.items()}
    files = {"file": ("a.wav", b"sound", "audio/wav")}
    return await serving.post(f"/v3{path}", data=form, files=files)


def _refused(answer: Any) -> tuple[str, str]:
    if answer.status_code == 200:
        return "", ""
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["code"] or ""


@pytest.mark.parametrize("path", _BODIES)
async def test_each_listed_field_has_its_result(serving: Serving, path: str) -> None:
    found: dict[str, str] = {}
    untyped = {"language", "prompt"} if path == "/audio/transcriptions" else set()  # any text is valid
    for row in (each for each in ROWS if each.path == path and each.field not in {"file", "model", "stream"} | untyped):
        answers = [await _post(serving, path, **{row.field: value}) for value in _VALUES]
        refused = [_refused(answer) for answer in answers]
        unsupported = (row.field, "unsupported_parameter")
        if row.result == "refused":
            accepted = json.loads(row.accepted) if row.accepted else False
            answer = await _post(serving, path, **{row.field: accepted})
            has_result = unsupported in refused and answer.status_code == 200
        elif row.result == "no effect":
            has_result = ("", "") in refused and all(param in {"", row.field} for param, _ in refused)
        else:
            has_result = any(param.startswith(row.field) for param, _ in refused)
        if not has_result or (row.field, "unknown_parameter") in refused:
            found[row.field] = f"listed as {row.result}: {refused}"
    assert found == {}


@pytest.mark.parametrize("path", _BODIES)
async def test_a_field_that_is_not_listed_is_refused(serving: Serving, path: str) -> None:
    listed = {row.field for row in ROWS if row.path == path}
    others = {row.field for row in ROWS} - listed - {"file"}
    answered = {name for name in others if _refused(await _post(serving, path, **{name: "x"}))[0] != name}
    assert answered == set()
    answer = await _post(serving, path, mirostat="2")
    assert _refused(answer) == ("mirostat", "unknown_parameter")
    assert (await _post(serving, path, **dict.fromkeys(("mirostat",), None))).status_code == (
        400 if path == "/audio/transcriptions" else 200
    )


async def test_several_unknown_fields_are_reported_in_one_message(serving: Serving) -> None:
    answer = await _post(serving, "/chat/completions", max_token=5, temperatur=1, top_p="x")
    message = answer.json()["error"]["message"]
    assert "'max_token'; did you mean 'max_tokens'?" in message
    assert "'temperatur'; did you mean 'temperature'?" in message
    assert "top_p is not a valid number" in message
    assert not service_of(serving).requests


async def test_the_form_of_ovms_ignores_unknown_fields(ovms_serving: Serving) -> None:
    for path in _BODIES:
        assert (await _post(ovms_serving, path, mirostat="2")).status_code == 200, path
    refused = await _post(ovms_serving, "/chat/completions", logit_bias={"1": 5})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [("function_call", {"name": "f", "arguments": "{}"}), ("prefix", True), ("partial", True), ("audio", {"id": "a"})],
)
async def test_fields_of_messages_that_would_change_the_prompt_are_refused(
    serving: Serving, field: str, value: Any
) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: value}]
    answer = await _post(serving, "/chat/completions", messages=messages)
    assert _refused(answer) == (f"messages[1].{field}", "unsupported_parameter")
