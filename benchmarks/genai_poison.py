"""A request whose form the library cannot impose among seven others: whether their texts are what they are without it.

Texts of a small model depend on who else is in the batch, so that the seven are compared with the seven by themselves,
as they are while the eighth has not come and once it is gone.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from benchmarks.report import Row

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["poisoned_step"]

_NEIGHBOURS: Final = 7
_TOKENS: Final = 48
_COMES_AFTER: Final = (1, 5, 20)
"""Steps, before the eighth request comes."""
_EXACT: Final = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
"""Without what makes a token's numbers hang on how many others are computed with it."""
_SCHEMA: Final = '{"type": "nonsense"}'


def _texts(folder: str, precision: str, poison_after: int | None) -> list[list[int]]:
    """Make the texts of the seven; gives their tokens."""
    from ovmstrio.core.generation import GenerationRequest, Grammar, GrammarKind, Sampling  # noqa: PLC0415 - only the process that measures loads the library
    from ovmstrio.openvino.engine.batch import Batch  # noqa: PLC0415 - as above
    from ovmstrio.openvino.engine.pipeline import Pipeline, PipelineOptions  # noqa: PLC0415 - as above
    from ovmstrio.openvino.engine.texts import AskedTexts  # noqa: PLC0415 - as above

    properties = {"INFERENCE_NUM_THREADS": 1, **(_EXACT if precision == "exact" else {})}
    pipeline = Pipeline(PipelineOptions(folder, "CPU", properties))
    batch = Batch(pipeline)

    def begin(number: int, **more: Any) -> None:
        request = GenerationRequest("", Sampling(temperature=0, ignore_eos=True), **more)
        text = f"Tell a long story about a lighthouse keeper and {number} gulls."
        prompt = pipeline.tokenizer.encode(text).input_ids.data[0].tolist()
        batch.begin(AskedTexts(number, 0, request, prompt, _TOKENS, 1, is_proven="grammar" not in more))

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


def poisoned_step(folder: Path) -> list[Row]:
    """Count the texts that end as if the eighth had not come, at full precision and at the device's own."""
    rows = []
    for precision in ("exact", "as served"):
        command = [sys.executable, "-m", "benchmarks.genai_poison", str(folder), precision]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        same = [int(each) for each in out.split()]
        is_met = min(same) == _NEIGHBOURS
        detail = f"{same} of {_NEIGHBOURS} when it comes after {list(_COMES_AFTER)} steps"
        what = f"texts of {_NEIGHBOURS} beside one that breaks a step, as without it, {precision}"
        rows.append(Row(what, min(same), str(_NEIGHBOURS), is_met, detail))
    return rows


if __name__ == "__main__":
    folder, precision = sys.argv[1:]
    undisturbed = _texts(folder, precision, None)
    for steps in _COMES_AFTER:
        disturbed = _texts(folder, precision, steps)
        print(sum(one == other for one, other in zip(undisturbed, disturbed, strict=True)))
