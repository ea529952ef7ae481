"""Streams of a server of text: tokens per CPU second, CPU per token of the server's process, and first tokens.

Every figure of a server is of :class:`Target`, so that servers of different projects are measured in the same way.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psutil

from benchmarks.models import trivial, write_repository
from benchmarks.processes import cpu_of_tree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["STREAMS", "THREADS", "TOKENS", "FirstTokens", "Target", "ask", "chat_entry", "prompts", "served"]

STREAMS: Final = (1, 8, 16)
TOKENS: Final = 64
THREADS: Final = {"INFERENCE_NUM_THREADS": 1}
_FIRST_TOKENS: Final = 16
_TIMEOUT_SECONDS: Final = 120
_numbers: Final = itertools.count()


class FirstTokens(NamedTuple):
    """Time to the first token of concurrent prompts: median wall milliseconds, and CPU milliseconds of a prompt."""

    wall: float
    cpu: float


class Target(NamedTuple):
    """A server's process and HTTP port."""

    process: psutil.Process
    port: int

    def tokens_per_second(self, streams: int) -> float:
        """Return tokens per CPU second of concurrent streams, of the process and its children together."""
        before = cpu_of_tree(self.process)
        _ask_all(self.port, streams, TOKENS)
        return streams * TOKENS / (cpu_of_tree(self.process) - before)

    def first_tokens(self, streams: int) -> FirstTokens:
        """Measure the first tokens of prompts that arrive together, which are their only ones."""
        before, walls = cpu_of_tree(self.process), []
        for _ in range(_FIRST_TOKENS // streams):
            walls += _ask_all(self.port, streams, 1)
        cpu = (cpu_of_tree(self.process) - before) / len(walls)
        return FirstTokens(statistics.median(walls) * 1e3, cpu * 1e3)


def prompts(count: int) -> list[str]:
    """Return texts that no caller had before, so that no cache has more of them than their beginning."""
    return [f"Tell a long story about a lighthouse keeper and {next(_numbers)} gulls." for _ in range(count)]


def _ask_all(port: int, streams: int, tokens: int) -> list[float]:
    """Stream texts concurrently; return the seconds to the first token of each."""
    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(lambda text: ask(port, text, tokens), prompts(streams)))


def ask(port: int, text: str, tokens: int = TOKENS, model: str = "chat") -> float:
    """Stream a text to its end and return the time to the first token in seconds, without that of the connection."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}
    data = json.dumps(body | {"stream": True, "temperature": 0})
    with closing(HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)) as connection:
        connection.connect()
        started, first = time.perf_counter(), 0.0
        connection.request("POST", "/v1/chat/completions", data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            sys.exit(f"the server answered {answer.status}: {answer.read().decode()}")
        for line in answer:
            if not first and any(_contents(line)):
                first = time.perf_counter() - started
    if not first:
        sys.exit("the server answered without text")
    return first


def _contents(line: bytes) -> Iterator[str]:
    """Yield the texts of a line of a stream of events; the first event of a server may have none."""
    if line.startswith(b"data: {"):
        for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
            yield choice["delta"].get("content") or ""


def chat_entry(base_path: Path, name: str = "chat", **more: Any) -> dict[str, Any]:
    """Return the configuration of a language model."""
    fixed = {"task": "text_generation", "plugin_config": THREADS, "cache_size": 1}
    return {"config": {"name": name, "base_path": str(base_path), **fixed, **more}}


def served(repository: Path) -> tuple[Path, Path]:
    """Write the real model, a trivial one, and a copy of the real one that sleeps when idle.

    Return the configuration and the model's folder.
    """
    prepare = [sys.executable, "-m", "ovmstrio.cli", "prepare", "--sample", "chat", "--repository", str(repository)]
    subprocess.run(prepare, check=True, capture_output=True)
    folder = repository / "chat"
    (folder / "generation_config.json").unlink()  # a repetition penalty would be work that other servers lack
    config = write_repository(repository, {"trivial": trivial()}, {})
    document = json.loads(config.read_text())
    entries = [chat_entry(folder), chat_entry(folder, "idle", idle_unload_seconds=1)]
    document["text_model_config_list"] = entries
    config.write_text(json.dumps(document))
    return config, folder
