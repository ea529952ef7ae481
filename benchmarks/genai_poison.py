"""A request with a grammar that the library rejects, among seven others: checks that their texts do not change.

Texts of a small model depend on the rest of the batch, so the benchmark compares with a run of the seven alone.  The
server tries a grammar outside of the batch, so a rejected one never reaches the batch.  If a step fails nevertheless,
the batch is rebuilt with one prefill of tokens that were decoded one by one; only exact arithmetic gives equal
results.
"""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["poisoned_step"]

_NEIGHBOURS: Final = 7
_TOKENS: Final = 48
_CONTEXT: Final = 2048
_COMES_AFTER: Final = (1, 5, 20)
"""Number of steps before the eighth request."""
_THREADS: Final = {"INFERENCE_NUM_THREADS": 1}
_EXACT: Final = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""Settings with which the result of a token does not depend on the batch size."""
_SCHEMA: Final = '{"type": "nonsense"}'
_TEXT: Final = "Tell a long story about a lighthouse keeper and {} gulls."


def _served(folder: str, poison_after: int | None) -> list[str]:
    """Generate the seven texts as an engine does."""
    from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling  # noqa: PLC0415 - only the process that measures loads the library
    from ovmstrio.inference.engine.engine import Engine, Limits  # noqa: PLC0415 - as above
    from ovmstrio.inference.engine.grammar_precompile import GrammarCompiler  # noqa: PLC0415 - as above
    from ovmstrio.inference.engine.messages import encode_request  # noqa: PLC0415 - as above
    from ovmstrio.inference.engine.pipeline import Pipeline, PipelineOptions  # noqa: PLC0415 - as above
    from ovmstrio.inference.engine.prompts import PromptTokenizer  # noqa: PLC0415 - as above

    pipeline = Pipeline(PipelineOptions(folder, "CPU", _THREADS))
    prompts = PromptTokenizer(pipeline.tokenizer, str, _CONTEXT)
    answers: dict[int, Any] = {}
    engine = Engine(pipeline, prompts, Limits(_CONTEXT), answers.__setitem__, GrammarCompiler(pipeline, Path(folder)))

    def add(number: int, **more: Any) -> None:
        sampling = Sampling(temperature=0, ignore_eos=True, max_tokens=_TOKENS)
        engine.add(number + 1, number, encode_request(GenerationRequest(_TEXT.format(number), sampling, **more)))

    made = [""] * (_NEIGHBOURS + 1)
    for number in range(_NEIGHBOURS):
        add(number)
    steps = rebuilds = 0
    while engine.is_busy or len(answers) < _NEIGHBOURS + (poison_after is not None):
        if steps == poison_after:
            add(_NEIGHBOURS, grammar=Grammar(GrammarKind.JSON_SCHEMA, _SCHEMA))
        if not engine.is_busy:
            select.select(engine.descriptors, [], [])
        rows, _, figures = engine.step()
        rebuilds = figures[5]
        for row in rows:
            made[row[0]] += row[2]
        steps += 1
    if rebuilds or (poison_after is not None and answers[_NEIGHBOURS + 1][0] != "refused"):
        sys.exit("the form has come to the batch")
    return made[:_NEIGHBOURS]


def _broken(folder: str, poison_after: int | None) -> list[list[int]]:
    """Generate the seven texts exactly, in a batch that the rejected grammar reaches; return their tokens."""
    from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling  # noqa: PLC0415 - as above
    from ovmstrio.inference.engine.batch import Batch, QueuedRequest  # noqa: PLC0415 - as above
    from ovmstrio.inference.engine.pipeline import Pipeline, PipelineOptions  # noqa: PLC0415 - as above

    pipeline = Pipeline(PipelineOptions(folder, "CPU", {**_THREADS, **_EXACT}))
    batch = Batch(pipeline)

    def begin(number: int, **more: Any) -> None:
        request = GenerationRequest("", Sampling(temperature=0, ignore_eos=True), **more)
        prompt = pipeline.tokenizer.encode(_TEXT.format(number)).input_ids.data[0].tolist()
        batch.begin(QueuedRequest(number, 0, request, prompt, _TOKENS, 1, is_grammar_proven="grammar" not in more))

    made: list[list[int]] = [[] for _ in range(_NEIGHBOURS + 1)]
    for number in range(_NEIGHBOURS):
        begin(number)
    steps = 0
    while batch.is_busy:
        if steps == poison_after:
            begin(_NEIGHBOURS, grammar=Grammar(GrammarKind.JSON_SCHEMA, _SCHEMA))
        for new in batch.step().news:
            made[new.asked.id] += new.tokens
        steps += 1
    if (poison_after is not None) != bool(batch.rebuilds):
        sys.exit("the step did not fail")
    return made[:_NEIGHBOURS]


_HOW: Final[dict[str, Callable[[str, int | None], Sequence[Any]]]] = {"served": _served, "broken": _broken}
_ROWS: Final = {
    "served": f"texts of {_NEIGHBOURS} with one whose grammar cannot be compiled, same as without",
    "broken": f"texts of {_NEIGHBOURS} with one that fails in a step, same as without, exact numbers",
}


def poisoned_step(folder: Path) -> list[Row]:
    """Count the texts that equal those without the eighth request."""
    rows = []
    for how, what in _ROWS.items():
        command = [sys.executable, "-m", "benchmarks.genai_poison", str(folder), how]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        same = [int(each) for each in out.split()]
        detail = f"{same} of {_NEIGHBOURS} when it comes after {list(_COMES_AFTER)} steps"
        rows.append(Row(what, min(same), str(_NEIGHBOURS), min(same) == _NEIGHBOURS, detail))
    return rows


if __name__ == "__main__":
    folder, how = sys.argv[1:]
    undisturbed = _HOW[how](folder, None)
    for steps in _COMES_AFTER:
        disturbed = _HOW[how](folder, steps)
        print(sum(one == other for one, other in zip(undisturbed, disturbed, strict=True)))
