"""The generation library alone, in a separate process: a bare loop of continuous batching, and its load.

The prompts are those of the servers; the scheduler has the library's defaults, so that it caches no prefixes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.genai_streams import STREAMS, THREADS, TOKENS, prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["bare_runs", "load_bare"]

_ALONE = 8


def _pipeline(folder: str) -> Any:
    import openvino_genai as genai  # noqa: PLC0415 - only this process needs it

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    return genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", THREADS)


def _run(folder: str) -> None:
    """Print tokens per second of CPU at each line: a number of texts in a batch, or "alone" for 8 in sequence."""
    batch, alone = _pipeline(folder), None
    config = batch.get_config()
    config.max_new_tokens, config.ignore_eos, config.do_sample = TOKENS, True, False
    print(flush=True)
    numbers = iter(range(1, 10**9))
    for line in sys.stdin:
        if line.strip() != "alone":
            count = int(line)
            texts = [_chat(batch, text) for text in prompts(count)]
            started = time.process_time()
            handles = [batch.add_request(next(numbers), text, config) for text in texts]
            while batch.has_non_finished_requests():
                batch.step()
                for handle in handles:
                    while handle.can_read():
                        handle.read()
        else:
            import openvino_genai as genai  # noqa: PLC0415 - as above

            count, alone = _ALONE, alone or genai.LLMPipeline(folder, "CPU", **THREADS)
            started = time.process_time()
            for text in prompts(count):
                alone.generate(text, config)
        print(count * TOKENS / (time.process_time() - started), flush=True)


def _chat(batch: Any, text: str) -> str:
    """Return the prompt of a chat, which the servers generate an answer to."""
    rendered: str = batch.get_tokenizer().apply_chat_template([{"role": "user", "content": text}], True)
    return rendered


@contextmanager
def _process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.genai_bare", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.stdin.close()


def _ask(process: subprocess.Popen[str], how: str) -> float:
    to, out = process.stdin, process.stdout
    assert to is not None
    assert out is not None
    to.write(f"{how}\n")
    to.flush()
    return float(out.readline())


@contextmanager
def bare_runs(folder: Path) -> Iterator[Callable[[int | str], float]]:
    """Start a process that measures the library on request."""
    with _process(folder) as process:
        for how in (*STREAMS, "alone"):
            _ask(process, str(how))
        yield lambda how: _ask(process, str(how))


def load_bare(folder: Path) -> None:
    """Load a model in a new process, and generate a token."""
    subprocess.run([sys.executable, "-c", _LOAD, str(folder)], check=True, stdout=subprocess.DEVNULL)


_LOAD = f"""
import os, sys
import openvino_genai as genai
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 1
batch = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {THREADS})
config = batch.get_config()
config.max_new_tokens = 1
batch.generate(["Hello"], [config])
os._exit(0)
"""

if __name__ == "__main__":
    _run(sys.argv[1])
