from __future__ import annotations

from pathlib import Path

import pytest

from ovmstrio.runtimes.handlers.config.project_file import read_project
from ovmstrio.runtimes.handlers.config.project_spec import DEFAULT_MODEL, ModelEntry, ModelsSpec, ProjectSpec
from tests.support.projects import PYTHON, TENSORFLOW, good, told, write


def _models(spec: ProjectSpec) -> ModelsSpec:
    assert spec.models is not None
    return spec.models


def test_one_path_is_the_model_without_a_name(tmp_path: Path) -> None:
    """The URL stays as it is written."""
    models = _models(good(tmp_path, f"{TENSORFLOW}models: {{path: s3://bucket/a/, signature_key: predict}}\n"))
    assert models == ModelsSpec(
        section="models",
        kind="path",
        entries=(ModelEntry(name=DEFAULT_MODEL, path="s3://bucket/a/", signature_key="predict"),),
        signature_key="predict",
    )
    assert not models.is_cached


def test_paths_have_names_and_signatures_of_their_own(tmp_path: Path) -> None:
    """The section's signature is for those without."""
    text = """models:
  signature_key: shared
  cache_size: 1
  disk_cache_size: 2
  latest_versions: 3
  reload_interval_seconds: 0.5
  paths:
    - {name: text-gen, path: gs://bucket/b, signature_key: own}
    - {name: plain, path: az://bucket/c/d}
"""
    models = _models(good(tmp_path, TENSORFLOW + text))
    assert (models.kind, models.is_cached, models.cache_size, models.disk_cache_size) == ("paths", True, 1, 2)
    assert (models.latest_versions, models.reload_interval_seconds) == (3, 0.5)
    assert models.entries == (
        ModelEntry(name="text-gen", path="gs://bucket/b", signature_key="own"),
        ModelEntry(name="plain", path="az://bucket/c/d", signature_key="shared"),
    )


def test_local_folders_lead_on_from_the_project(tmp_path: Path) -> None:
    """One that is not there yet is a warning."""
    (tmp_path / "stock").mkdir()
    assert _models(good(tmp_path, f"{PYTHON}multi_model_reloading: {{dir: stock}}\n")).dir == str(tmp_path / "stock")
    (tmp_path / "stock").rmdir()
    spec, warnings = read_project(write(tmp_path, f"{PYTHON}multi_model_reloading: {{dir: stock}}\n"))
    assert _models(spec).dir == str(tmp_path / "stock")
    assert [(each.path, each.message) for each in warnings] == [
        ("multi_model_reloading.dir", f"{tmp_path / 'stock'} is no folder now")
    ]


def test_a_file_url_is_a_local_folder(tmp_path: Path) -> None:
    """It stays as it is written; what is escaped in it is looked for unescaped."""
    (tmp_path / "my models").mkdir()
    url = f"file://{tmp_path}/my%20models"
    assert _models(good(tmp_path, f"{PYTHON}multi_model_reloading: {{dir: '{url}'}}\n")).dir == url


def test_models_are_another_name_for_python(tmp_path: Path) -> None:
    """Which is deprecated; both at once are a contradiction."""
    spec, warnings = read_project(write(tmp_path, f"{PYTHON}models: {{dir: s3://bucket/a}}\n"))
    assert (_models(spec).section, _models(spec).dir) == ("models", "s3://bucket/a")
    assert [(each.line, each.suggestion) for each in warnings] == [(3, "write 'multi_model_reloading'")]
    both = f"{PYTHON}models: {{dir: s3://bucket/a}}\nmulti_model_reloading: {{dir: s3://bucket/a}}\n"
    assert [(line, path) for line, path, _ in told(tmp_path, both)] == [(3, "models")]


def test_reloading_is_not_for_tensorflow(tmp_path: Path) -> None:
    """Its models have a key of their own."""
    assert told(tmp_path, f"{TENSORFLOW}multi_model_reloading: {{dir: s3://bucket/a}}\n") == [
        (3, "multi_model_reloading", "the key is for the type python")
    ]


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{}", [("models", "one of 'path', 'paths' and 'dir' must be given, found none")]),
        (
            "{path: s3://b/a, dir: s3://b/c}",
            [("models", "one of 'path', 'paths' and 'dir' must be given, found 'path' and 'dir'")],
        ),
        (
            "{dir: s3://b/a, cache_size: 3}",
            [("models.cache_size", "the key needs 'disk_cache_size' beside it")],
        ),
        (
            "{dir: s3://b/a, disk_cache_size: 3}",
            [("models.disk_cache_size", "the key needs 'cache_size' beside it")],
        ),
        (
            "{dir: s3://b/a, cache_size: 3, disk_cache_size: 2}",
            [("models.cache_size", "more models cannot be in memory than on disk")],
        ),
        (
            "{path: s3://b/a, cache_size: 1, disk_cache_size: 2}",
            [("models.cache_size", "models are cached where there are many")],
        ),
        (
            "{dir: s3://b/a, cache_size: 0, disk_cache_size: x}",
            [
                ("models.cache_size", "the value cannot be used"),
                ("models.disk_cache_size", "the value cannot be used"),
            ],
        ),
        ("{dir: s3://b/a, latest_versions: 0}", [("models.latest_versions", "the value cannot be used")]),
        ("{paths: []}", [("models.paths", "the list is empty")]),
        ("{paths: {name: a}}", [("models.paths", "wrong type")]),
        ("{paths: [a]}", [("models.paths[0]", "wrong type")]),
        ("{paths: [{path: s3://b/a}]}", [("models.paths[0]", "the key 'name' is missing")]),
        ("{paths: [{name: a}]}", [("models.paths[0]", "the key 'path' is missing")]),
        ("{paths: [{name: a/b, path: s3://b/a}]}", [("models.paths[0].name", "the name cannot be used")]),
        (
            "{paths: [{name: a, path: s3://b/a}, {name: a, path: s3://b/c}]}",
            [("models.paths[1].name", "the name 'a' is another model's")],
        ),
        ("{path: s3://bucket}", [("models.path", "a bucket and a folder in it are needed")]),
        ("{path: s3://bucket/}", [("models.path", "a bucket and a folder in it are needed")]),
        ("{path: s3:///a}", [("models.path", "a bucket and a folder in it are needed")]),
        ("{path: memory://}", [("models.path", "the URL names no folder")]),
        ("{dir: [a]}", [("models.dir", "the value cannot be used")]),
        ("3", [("models", "wrong type")]),
    ],
    ids=str,
)
def test_what_models_cannot_be(tmp_path: Path, section: str, expected: list[tuple[str, str]]) -> None:
    """Each mistake is told at its key."""
    found = told(tmp_path, f"{TENSORFLOW}models: {section}\n")
    assert [(path, message) for _, path, message in found] == expected


def test_caches_need_a_single_process(tmp_path: Path) -> None:
    """The others would not find what one has loaded."""
    text = f"{PYTHON}processes: 2\nmulti_model_reloading: {{dir: s3://b/a, cache_size: 1, disk_cache_size: 1}}\n"
    assert told(tmp_path, text) == [
        (3, "processes", "the models of 'multi_model_reloading' are cached, which one process alone can do")
    ]


def test_signatures_mean_nothing_to_python(tmp_path: Path) -> None:
    """A warning says so, for the section and for each entry."""
    text = "multi_model_reloading: {signature_key: a, paths: [{name: b, path: s3://b/c, signature_key: d}]}\n"
    _, warnings = read_project(write(tmp_path, PYTHON + text))
    assert [each.path for each in warnings] == [
        "multi_model_reloading.signature_key",
        "multi_model_reloading.paths[0].signature_key",
    ]
