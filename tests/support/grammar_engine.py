"""openvino-genai's own opinion of grammars, from a process that may be stopped when it takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ovmstrio.core.generation import Grammar, GrammarKind
from tests.support.processes import killed_if_late

_PROGRAM: Final = Path(__file__).with_name("grammar_program.py")
_KINDS: Final = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}


class GrammarEngine:
    """Makes a few tokens of a grammar."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process: Final = process

    def make(
        self, grammar: Grammar, *, tokens: int = 4, seed: int | None = None, seconds: float = 120
    ) -> tuple[str, str]:
        asked: dict[str, Any] = {"kind": _KINDS[grammar.kind], "text": grammar.text, "tokens": tokens, "seed": seed}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with killed_if_late(self._process, seconds):
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, f"the engine ended over {grammar.text[:200]}"
        answer = json.loads(line)
        return answer["error"], answer["text"]


@contextmanager
def grammar_engine(folder: Path) -> Iterator[GrammarEngine]:
    process = subprocess.Popen(
        [sys.executable, str(_PROGRAM), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        with process:
            yield GrammarEngine(process)
            assert process.stdin is not None
            process.stdin.close()
    finally:
        process.kill()
        process.wait()
