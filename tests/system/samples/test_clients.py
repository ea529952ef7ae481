from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ovmstrio.samples
from ovmstrio.samples import prepare_repository
from tests.support.plain_http import BreakingHandler, answering_http

SAMPLES = Path(ovmstrio.samples.__file__).parent
ROOT = Path(__file__).parents[3]
CLIENTS = sorted(file.parent.name for file in SAMPLES.glob("*/client.py"))

# Options that all clients may have, those of single clients, and the clients without --model or --input.
OPTIONS = {"--help", "--url", "--rest", "--model", "--input"}
OWN = {
    "embedding": {"--tokenizer"},
    "handler_iris": {"--version"},
    "handler_primes": {"--count"},
    "handler_sklearn": {"--version"},
    "ocr": {"--characters"},
    "search": {"--folder"},
    "speech": {"--tokenizer"},
    "transcription": {"--subtitles"},
    "voice": {"--output", "--speed", "--voice"},
}
WITHOUT_MODEL = {*(name for name in CLIENTS if name.startswith("handler_")), "ocr", "pitch", "speech"}
WITHOUT_INPUT = {
    *("add_one", "custom_node_c", "embedding", "ensemble", "error_output", "handler_batching", "handler_caching"),
    *("handler_iris", "handler_sklearn", "iris", "ops_diamond", "ops_regression", "pitch"),
}

IMPORT_WITHOUT = """
import importlib, json, sys
absent = set(json.loads(sys.argv[1]))

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""
RUN_EACH = """
import json, os, runpy, sys, traceback
import numpy, PIL, grpc, openai, ovmstrio.client, ovmstrio.samples.asking, ovmstrio.samples.triton
options, *names = json.loads(sys.argv[1])
for name in names:
    if os.fork() == 0:
        os.dup2(1, 2)
        sys.argv = ["client", *options]
        code = 0
        try:
            runpy.run_module(f"ovmstrio.samples.{name}.client", run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
            if isinstance(code, str):
                print(code)
                code = 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # The end of an interpreter with all these modules takes long.
    _, status = os.wait()
    print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)
"""


def _run_each(names: list[str], *options: str) -> dict[str, tuple[int, str]]:
    """Run clients in forks of one process; return their exit codes and outputs."""
    command = [sys.executable, "-c", RUN_EACH, json.dumps([options, *names])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    texts, codes = re.split(r'{"ended": \d+}\n', done.stdout), re.findall(r'{"ended": (\d+)}\n', done.stdout)
    return dict(zip(names, zip(map(int, codes), texts, strict=False), strict=True))


def test_clients_have_the_same_options() -> None:
    for name, (code, text) in _run_each(CLIENTS, "--help").items():
        assert (code, text.startswith("usage: ")) == (0, True), text
        assert "--url URL" in text
        assert "positional arguments" not in text
        assert (name in WITHOUT_MODEL) is ("--model MODEL" not in text), name
        assert (name in WITHOUT_INPUT) is not ("--input " in text), name
        assert set(re.findall(r"(--\w+)", text)) <= OPTIONS | OWN.get(name, set()), name
        assert "arning" not in text


def test_clients_report_an_unreachable_server_in_one_line() -> None:
    names = ["incrementer", "handler_iris", "ops_regression", "iris", "handler_primes"]
    for name, (code, text) in _run_each(names, "--url", "127.0.0.1:9").items():
        assert code == 1, name
        assert re.fullmatch(r"error: .*\n", text), text


def test_a_client_reports_a_truncated_answer(tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    with answering_http(BreakingHandler) as address:
        done = _run_each(["voice"], "--url", address, "--output", str(file))["voice"]
    assert (done[0], done[1].startswith("error: the answer broke off"), "Traceback" in done[1]) == (1, True, False)
    assert file.read_bytes() == b": half"


def test_concurrent_preparations_agree(tmp_path: Path) -> None:
    code = f"import pathlib, ovmstrio.samples as s; print(s.prepare_repository(pathlib.Path({str(tmp_path)!r})))"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert answers == {str(prepare_repository(tmp_path))}
    assert len(list(tmp_path.iterdir())) == 1


def test_the_file_type_client_does_not_import_magika() -> None:
    code = (
        "import sys, ovmstrio.samples.file_type.client as client;"
        "client.labels(); print({'magika', 'onnxruntime'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "set()"


def _installed_by(requirements: Iterable[str]) -> set[str]:
    """Return the normalized names of the distributions that an installation of requirements brings."""
    found: set[tuple[str, str]] = set()
    pending = [(requirement, "") for requirement in map(Requirement, requirements)]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for each in {"", *requirement.extras}:
            if (key := (canonicalize_name(requirement.name), each)) not in found:
                found.add(key)
                with suppress(PackageNotFoundError):
                    pending += [(Requirement(text), each) for text in requires(requirement.name) or []]
    return {name for name, _ in found}


def test_clients_of_the_readme_need_only_packages_of_its_first_command() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "pip install -q '.[samples]'" in readme
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = _installed_by([*project["dependencies"], *project["optional-dependencies"]["samples"]])
    clients = [
        f"ovmstrio.samples.{name}.client" for name in set(re.findall(r"ovmstrio.samples\.(\w+)\.client", readme))
    ]
    clients += set(re.findall(r"^from (tritonclient[\w.]*) import", readme, re.MULTILINE))
    brought = packages_distributions()
    absent = {
        module
        for module, packages in brought.items()
        if not {canonicalize_name(each) for each in packages} & (installed | {"ovmstrio"})
    }
    assert {"pytest", "sklearn", "hypothesis"} <= absent
    asked = [sys.executable, "-c", IMPORT_WITHOUT, json.dumps(sorted(absent)), *clients]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
