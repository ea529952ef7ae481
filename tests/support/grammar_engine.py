"""Validation of grammars by openvino-genai, in a process that is stopped after a timeout."""

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

_KINDS: Final = {
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "grammar",
    GrammarKind.STRUCTURAL_TAG: "structural_tag",
}


class GrammarEngine:
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
        [sys.executable, "-m", "tests.support.grammar_engine", str(folder)],
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


def _engine(folder: str) -> Any:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 64
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")


def _config(kind: str, text: str, tokens: int, seed: int | None) -> Any:
    import openvino_genai as genai

    form = genai.StructuredOutputConfig()
    if kind == "structural_tag":
        form.structural_tags_config = text
    else:
        setattr(form, kind, text)
    asked = genai.GenerationConfig()
    asked.max_new_tokens = tokens
    if seed is not None:
        asked.do_sample, asked.rng_seed, asked.temperature = True, seed, 1.5
    asked.structured_output_config = form
    return asked


def main() -> None:
    """Make texts of grammars, one JSON line each: ``{"kind", "text"}`` -> ``{"error", "text"}``.

    A grammar that is refused makes every later step throw as well, so that a new engine follows each of those.
    """
    folder = sys.argv[1]
    pipe = _engine(folder)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        answer = {"error": "", "text": ""}
        try:
            handle = pipe.add_request(
                number, "a", _config(asked["kind"], asked["text"], asked["tokens"], asked["seed"])
            )
            while pipe.has_non_finished_requests():
                pipe.step()
            tokens = [token for output in handle.read_all() for token in output.generated_ids]
            answer["text"] = pipe.get_tokenizer().decode(tokens)
        except Exception as error:  # noqa: BLE001 -- any error is the answer
            answer["error"] = str(error)[-300:] or type(error).__name__
            pipe = _engine(folder)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
