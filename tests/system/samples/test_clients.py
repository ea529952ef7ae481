"""The samples' clients: all are called in one way, and those of the README run after its first command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

import ovmstrio_samples

SAMPLES = Path(ovmstrio_samples.__file__).parent
ROOT = Path(__file__).parents[3]
CLIENTS = sorted(file.parent.name for file in SAMPLES.glob("*/client.py"))

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
"""What a client takes besides."""
WITHOUT_MODEL = {
    *(name for name in CLIENTS if name.startswith("handler_")),
    *("ocr", "pitch", "speech"),
}
"""Those of services that have a server alone, and those that call several models."""
WITH_INPUT = {
    *("chat", "counter_stream", "face_detection", "file_type", "handler_primes", "image_classifier", "image_pipeline"),
    *(
        "incrementer",
        "labels_image",
        "ocr",
        "ocr_pipeline",
        "ops_ocr",
        "orientation",
        "search",
        "speech",
        "text_generation",
        "transcription",
        "voice",
    ),
    *("vad", "vad_stateful"),
}
"""Those that can be asked about something of the user's."""

# A fork each, because a client is a program that is run once; what they share is imported before.
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
ASK_EACH_FOR_HELP = """
import json, os, runpy, sys
import numpy, PIL
print("begun", flush=True)
for name in sys.argv[1:]:
    if os.fork() == 0:
        os.dup2(1, 2)
        sys.argv = ["client", "--help"]
        print(json.dumps(name), flush=True)
        runpy.run_module(f"ovmstrio_samples.{name}.client", run_name="__main__", alter_sys=True)
    _, status = os.wait()
    print(json.dumps({"ended": os.waitstatus_to_exitcode(status)}), flush=True)
"""


def test_every_client_is_called_by_the_same_options() -> None:
    """With status 0, and nothing else is said: no warning, no traceback."""
    command = [sys.executable, "-c", ASK_EACH_FOR_HELP, *CLIENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    told = done.stdout.removeprefix("begun\n").split('{"ended": 0}\n')
    assert len(told) == len(CLIENTS) + 1, done.stdout
    for name, text in zip(CLIENTS, told, strict=False):
        assert text.startswith(f"{json.dumps(name)}\nusage: "), text
        assert "--url URL" in text
        assert "positional arguments" not in text
        assert (name in WITHOUT_MODEL) is ("--model MODEL" not in text), name
        assert (name in WITH_INPUT) is ("--input " in text), name
        assert set(re.findall(r"(--\w+)", text)) <= OPTIONS | OWN.get(name, set()), name
        assert "arning" not in text


@pytest.mark.parametrize("sample", ["incrementer", "handler_iris", "ops_regression", "iris", "handler_primes"])
def test_a_client_that_nobody_answers_ends_in_one_line(sample: str) -> None:
    """Over KServe, plain HTTP and a gRPC service alike."""
    command = [sys.executable, "-m", f"ovmstrio_samples.{sample}.client", "--url", "127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*\n", done.stderr), done.stderr


def _installed_by(requirements: Iterable[str]) -> set[str]:
    """Give the distributions that an installation of requirements brings, by normalized name."""
    found: set[str] = set()
    pending = list(requirements)
    while pending:
        text, _, marker = pending.pop().partition(";")
        name, extras = re.match(r"\s*([\w.-]+)(?:\[([\w,-]+)\])?", text).groups()  # type: ignore[union-attr]
        wanted = set((extras or "").split(","))
        asked = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if asked is not None:
            continue
        name = name.lower().replace("_", "-")
        key = name + (f"[{extras}]" if extras else "")
        if key in found:
            continue
        found |= {key, name}
        try:
            further = requires(name) or []
        except PackageNotFoundError:
            continue
        for line in further:
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
            if extra is None or extra[1] in wanted:
                pending.append(line.partition(";")[0])
    return found


def test_clients_in_the_readme_need_no_more_than_its_first_command_installs() -> None:
    """Every package that they import comes with the server or the extra ``samples``."""
    readme = (ROOT / "README.md").read_text()
    assert "pip install -q '.[samples]'" in readme
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = _installed_by([*project["dependencies"], *project["optional-dependencies"]["samples"]])
    clients = [
        f"ovmstrio_samples.{name}.client" for name in set(re.findall(r"ovmstrio_samples\.(\w+)\.client", readme))
    ]
    clients += set(re.findall(r"^from (tritonclient[\w.]*) import", readme, re.MULTILINE))
    brought = packages_distributions()
    absent = {
        module
        for module, packages in brought.items()
        if not {each.lower().replace("_", "-") for each in packages} & (installed | {"ovmstrio"})
    }
    assert {"pytest", "sklearn", "hypothesis"} <= absent
    asked = [sys.executable, "-c", IMPORT_WITHOUT, json.dumps(sorted(absent)), *clients]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
