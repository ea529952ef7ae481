"""A program that makes texts of grammars, one JSON line each: ``{"kind", "text"}`` -> ``{"error", "text"}``.

A grammar that it refuses makes every later step throw as well, so that there is a new engine after each of those.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openvino_genai as genai


def engine(folder: str) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = 64
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU")


def config(kind: str, text: str, tokens: int, seed: int | None) -> Any:
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
    folder = sys.argv[1]
    pipe = engine(folder)
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        answer = {"error": "", "text": ""}
        try:
            handle = pipe.add_request(number, "a", config(asked["kind"], asked["text"], asked["tokens"], asked["seed"]))
            while pipe.has_non_finished_requests():
                pipe.step()
            tokens = [token for output in handle.read_all() for token in output.generated_ids]
            answer["text"] = pipe.get_tokenizer().decode(tokens)
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is the answer
            answer["error"] = str(error)[-300:] or type(error).__name__
            pipe = engine(folder)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
