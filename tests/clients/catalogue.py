"""The client programs that are run against servers, by package, and their results as tables.

``just clients [PYTHON ...]`` runs all of them and updates the tables of ``docs/clients.md``; interpreters are of
environments that have packages which are not installed here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from tests.clients.node_packages import NODE, installed_version, run_program
from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread
from tests.support.tiny_encoders import write_embedder, write_reranker
from tests.support.tiny_llm import write_tiny_folder

__all__ = ["CLIENTS", "TEXT_CLIENTS", "Client", "Outcome", "run_client", "serving_repository", "serving_texts"]

PROGRAMS: Final = Path(__file__).parent / "programs"
DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "clients.md"
SECONDS: Final = 120


@dataclass(frozen=True, slots=True)
class Client:
    """Client program for a package, in Python or, by ``runs_on``, Node."""

    package: str
    program: str
    does: str
    runs_on: Literal["python", "node"] = "python"

    @property
    def version(self) -> str:
        """The package's version here; empty if it is not installed."""
        if self.runs_on == "node":
            return installed_version(self.package)
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


CLIENTS: Final = (
    Client(
        "tritonclient", "triton_infer", "health, metadata, statistics; inferences with asyncio, texts, gzip, classes"
    ),
    Client("tritonclient", "triton_sequences", "sequences over a stream, ids as numbers and texts"),
    Client("tritonclient", "triton_shared_memory", "system shared memory; CUDA's is refused"),
    Client("tritonclient", "triton_model_control", "index, loads with settings, unloads"),
    Client("ovmsclient", "ovms_client", "TensorFlow Serving's API: state, metadata, predictions"),
    Client("grpcio-health-checking", "grpc_standard", "health and reflection, with grpcio-reflection"),
    Client("kserve", "kserve_sdk", "KServe's SDK: health and inferences, JSON and binary, REST and gRPC"),
    Client("mlserver", "mlserver_codecs", "codecs of requests and answers"),
)

TEXT_CLIENTS: Final = (
    Client("openai", "openai", "all of it, with schemas of zod", runs_on="node"),
    Client(
        "@ai-sdk/openai-compatible", "ai_sdk", "texts, objects, tools in steps, embeddings, by `ai`", runs_on="node"
    ),
    Client("langchain-openai", "langchain_chat", "chats over both APIs, tools, typed output, embeddings, completions"),
    Client("llama-index-llms-openai-like", "llama_index_llm", "chats, tools, completions, embeddings"),
    Client("litellm", "litellm_sdk", "chats, tools, schemas, completions, embeddings, its classes of errors"),
    Client("instructor", "instructor_modes", "TOOLS, TOOLS_STRICT, JSON_SCHEMA, RESPONSES_TOOLS, JSON, MD_JSON; parts"),
    Client("pydantic-ai-slim", "pydantic_ai_agent", "agents over both APIs, events, typed output"),
    Client("openai-agents", "openai_agents", "agents over both APIs, tools, handoffs, typed output"),
    Client("smolagents", "smolagents_model", "its model, events, a tool"),
    Client("haystack-ai", "haystack_chat", "chats, events, tools, embedders"),
    Client("dspy", "dspy_lm", "its language model, several texts"),
    Client("llm", "llm_command", "the command: events, conversations, schemas"),
    Client("lm_eval", "lm_eval_completions", "probabilities of prompts' tokens in batches, texts, chats"),
    Client("aider-chat", "aider_command", "the command: a question about a file, as events"),
    Client("guidellm", "guidellm_load", "health, chats as events, side by side, and its report of them"),
    Client("cohere", "cohere_rerank", "scores"),
    Client("anthropic", "anthropic_messages", "messages, events, tools, schemas, prefill, token counts, errors"),
    Client("@anthropic-ai/sdk", "anthropic", "messages, events, tools, token counts, errors", runs_on="node"),
    Client("ollama", "ollama_client", "chats, texts, schemas, tools, embeddings, lists of models, errors"),
    Client("ollama", "ollama", "chats, texts, schemas, tools, embeddings, lists of models, errors", runs_on="node"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a program (``passes``, ``fails`` or ``not installed here``) and the end of its output."""

    client: Client
    result: str
    output: str = ""
    version: str = ""


@contextmanager
def serving_repository(folder: Path) -> Iterator[ServedInThread]:
    """Serve what the programs ask for, with all that they need turned on."""
    models = {
        "dummy": ir.dummy((-1, 10)),
        "spare": ir.dummy((-1, 10)),
        "strings": ir.string_passthrough(),
        "sums": ir.accumulator(),
    }
    entries = [
        {"config": {"name": name, "base_path": str(ir.save(model, folder, name)), "stateful": name == "sums"}}
        for name, model in models.items()
    ]
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": entries}))
    names = ",".join(name for name in models if name != "spare")
    options = {"model_control": "explicit", "load_model": names, "allow_shared_memory": True}
    with serving_in_thread(config_path=config, **options) as server:
        yield server


@contextmanager
def serving_texts(folder: Path) -> Iterator[ServedInThread]:
    """Serve what the programs of OpenAI's API ask for: models of noise, whose forced calls and forms hold."""
    words = write_embedder(folder / "words")
    paths: dict[str, dict[str, Any]] = {
        "chat": {"base_path": str(write_tiny_folder(folder / "chat")), "cache_size": 0.05},
        "words": {"base_path": str(words), "task": "embeddings", "pooling": "MEAN"},
        "ranks": {"base_path": str(write_reranker(folder / "ranks", words)), "task": "rerank"},
    }
    entries = [{"config": {"name": name, **settings}} for name, settings in paths.items()]
    config = folder / "config.json"
    config.write_text(json.dumps({"model_config_list": [], "text_model_config_list": entries}))
    with serving_in_thread(config_path=config) as server:
        yield server


def run_client(client: Client, server: ServedInThread, python: str = sys.executable) -> Outcome:
    """Run a program in a process of its own."""
    if client.runs_on == "node":
        ran = run_program(NODE / f"{client.program}.mjs", server.grpc, server.http, seconds=SECONDS)
        return Outcome(client, "fails" if ran.returncode else "passes", ran.stdout[-2_000:])
    command = [python, str(PROGRAMS / f"{client.program}.py"), server.grpc, server.http]
    done = subprocess.run(
        command, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return Outcome(client, "fails" if done.returncode else "passes", done.stdout[-2_000:])


def _with_row(document: str, outcome: Outcome) -> str:
    """Replace the row of a program; a program that is not installed keeps its row."""
    client = outcome.client
    if not outcome.version:
        return document
    cells = (f"`{client.package}`", outcome.version, f"`{client.program}`", client.does, outcome.result)
    row = f"| {' | '.join(cells)} |"
    known = rf"^\| `{re.escape(client.package)}` \| .* \| `{client.program}` \| .*$"
    return re.sub(known, lambda _: row, document, flags=re.MULTILINE)


def _home_of(client: Client, others: list[str]) -> tuple[str, str]:
    """Find an interpreter that has a client's package, and the package's version; empty texts if none has."""
    if client.version or client.runs_on == "node":
        return (sys.executable if client.version else ""), client.version
    code = f"from importlib.metadata import version; print(version({client.package!r}))"
    for python in others:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
        if not done.returncode:
            return python, done.stdout.strip()
    return "", ""


def _run_all(clients: tuple[Client, ...], server: ServedInThread) -> list[Outcome]:
    outcomes = []
    for client in clients:
        python, found = _home_of(client, sys.argv[1:])
        try:
            outcome = run_client(client, server, python) if python else Outcome(client, "not installed here")
        except subprocess.TimeoutExpired as error:
            outcome = Outcome(client, "fails", str(error))
        outcomes.append(replace(outcome, version=found))
        print(outcome.result, client.program, outcome.output)  # noqa: T201 - the output of the command
    return outcomes


def main() -> None:
    """Run what is installed, here or elsewhere, and update the tables of the document."""
    document = DOCUMENT.read_text()
    for clients, serving in ((CLIENTS, serving_repository), (TEXT_CLIENTS, serving_texts)):
        with TemporaryDirectory() as folder, serving(Path(folder)) as server:
            for outcome in _run_all(clients, server):
                document = _with_row(document, outcome)
    DOCUMENT.write_text(document)


if __name__ == "__main__":
    main()
