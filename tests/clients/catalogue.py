"""The client programs that are run against a served repository, by package, and what came of it as a table.

``python -m tests.clients.catalogue [PYTHON ...]`` runs all of them and writes ``docs/clients.md``; interpreters are of
environments that have packages which are not installed here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.support import ir
from tests.support.served_in_thread import ServedInThread, serving_in_thread

__all__ = ["CLIENTS", "Client", "Outcome", "run_client", "serving_repository", "table"]

PROGRAMS: Final = Path(__file__).parent / "programs"
DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "clients.md"
SECONDS: Final = 120


@dataclass(frozen=True, slots=True)
class Client:
    """A program of ours that makes the calls of a package's users."""

    package: str
    program: str
    does: str

    @property
    def version(self) -> str:
        """The package's version here; empty if it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""


CLIENTS: Final = (
    Client("tritonclient", "triton_infer", "health, metadata, configuration, statistics; inferences, also of asyncio"),
    Client("tritonclient", "triton_strings", "texts"),
    Client("tritonclient", "triton_sequences", "sequences over a stream, ids as numbers and texts"),
    Client("tritonclient", "triton_shared_memory", "system shared memory; CUDA's is refused"),
    Client("tritonclient", "triton_model_control", "index, loads with settings, unloads"),
    Client("tritonclient", "triton_classes", "classification"),
    Client("tritonclient", "triton_compression", "gzip and deflate"),
    Client("ovmsclient", "ovms_client", "TensorFlow Serving's API: state, metadata, predictions"),
    Client("grpcio-health-checking", "grpc_standard", "health and reflection, with grpcio-reflection"),
    Client("kserve", "kserve_sdk", "KServe's SDK: health and inferences, JSON and binary, REST and gRPC"),
    Client("mlserver", "mlserver_codecs", "codecs of requests and answers"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a program: ``passes``, ``fails`` or ``not installed here``, and the end of what it printed."""

    client: Client
    result: str
    said: str = ""
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


def run_client(client: Client, server: ServedInThread, python: str = sys.executable) -> Outcome:
    """Run a program in a process of its own."""
    command = [python, str(PROGRAMS / f"{client.program}.py"), server.grpc, server.http]
    done = subprocess.run(
        command, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return Outcome(client, "fails" if done.returncode else "passes", done.stdout[-2_000:])


def table(outcomes: list[Outcome]) -> str:
    """Write the document."""
    rows = "\n".join(
        f"| `{each.client.package}` | {each.version} | `{each.client.program}` | {each.client.does} | {each.result} |"
        for each in outcomes
    )
    return (
        "# Clients of others\n\n"
        "Programs of the project's own that make the calls of these packages' users, each run in a process of "
        "its own against a served repository (`tests/clients`). The table is written by "
        "`python -m tests.clients.catalogue`, out of what came of them.\n\n"
        "| package | version | program | what it does | result |\n|---|---|---|---|---|\n"
        f"{rows}\n\n"
        "`perf-analyzer` is on the package index in name only for some platforms: what is installed from there has no "
        "program to run, so it is not in the table.\n"
    )


def _home_of(client: Client, others: list[str]) -> tuple[str, str]:
    """Find an interpreter that has a client's package, and the package's version; empty texts if none has."""
    if client.version:
        return sys.executable, client.version
    code = f"from importlib.metadata import version; print(version({client.package!r}))"
    for python in others:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False)
        if not done.returncode:
            return python, done.stdout.strip()
    return "", ""


def main() -> None:
    """Run what is installed, here or elsewhere, and write the document."""
    outcomes = []
    with TemporaryDirectory() as folder, serving_repository(Path(folder)) as server:
        for client in CLIENTS:
            python, found = _home_of(client, sys.argv[1:])
            outcome = run_client(client, server, python) if python else Outcome(client, "not installed here")
            outcomes.append(replace(outcome, version=found))
            print(outcome.result, client.program, outcome.said)  # noqa: T201 - what the command is for
    DOCUMENT.write_text(table(outcomes))


if __name__ == "__main__":
    main()
