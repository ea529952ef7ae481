from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from ovmstrio.core.errors import ConfigError
from ovmstrio.handlers.config.dockerfile import make_dockerfile
from ovmstrio.handlers.config.project_file import (
    find_project_file,
    log_image_only_keys,
    read_project,
    supported_python,
    supported_tensorflow,
    to_yaml,
    ubuntu_for_cuda,
)
from ovmstrio.handlers.config.project_spec import (
    DEFAULT_MODEL,
    Dependencies,
    GpuVersion,
    ImageSpec,
    ModelEntry,
    ModelsSpec,
    ProjectBatching,
    ProjectSpec,
)
from tests.support.examples import examples
from tests.support.projects import PYTHON, TENSORFLOW, good, problems_of, write, wrong

_CACHED = "multi_model_reloading: {dir: s3://b/a, cache_size: 1, disk_cache_size: 1}"
_BATCHING = "server_side_batching: {max_batch_size: 8, batch_interval_seconds: 1}"
_ONE = "server_side_batching: {max_batch_size: 1, batch_interval_seconds: 1}"
_MODELS = "models: {dir: s3://b/a}"

# Keys


def test_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    spec = good(
        tmp_path,
        """
type: python
py_version: 3.12
serve_port: 9001
env: {FLAG: true, COUNT: 3, RATE: 0.5, TEXT: a b, NONE: }
config:
  names: [a, b]
  nested: {depth: 1.5}
python_path: src
path: handler.py
protobuf_path: my.proto
multi_model_reloading:
  dir: s3://bucket/models
processes: 2
threads_per_process: 8
max_concurrency: 32
log_level: Debug
gpu: true
gpu_version: {cuda: 11.1, cudnn: 8, development_image: yes}
dependencies: {pip: deps/pip.txt, shell: setup.sh}
use_local_cortex_libs: true
""",
        my__proto="",
    )
    assert (spec.serve_port, spec.processes, spec.threads_per_process, spec.max_concurrency) == (9001, 2, 8, 32)
    assert spec.env == {"FLAG": "True", "COUNT": "3", "RATE": "0.5", "TEXT": "a b"}
    assert spec.config == {"names": ["a", "b"], "nested": {"depth": 1.5}}
    assert (spec.python_path, spec.handler_path) == (tmp_path / "src", tmp_path / "handler.py")
    assert (spec.protobuf_path, spec.protocol) == (tmp_path / "my.proto", "grpc")
    assert spec.models is not None
    assert (spec.models.kind, spec.models.dir) == ("dir", "s3://bucket/models")
    assert spec.log_level == "debug"
    assert spec.image == ImageSpec(
        keys=("py_version", "gpu", "gpu_version", "dependencies", "use_local_cortex_libs"),
        py_version="3.12",
        tfs_version="2.3.0",
        gpu=True,
        gpu_version=GpuVersion(cuda="11.1", cudnn="8", development_image=True),
        dependencies=Dependencies(pip="deps/pip.txt", conda="conda-packages.txt", shell="setup.sh"),
        use_local_cortex_libs=True,
    )


def test_keys_without_a_value_have_their_defaults(tmp_path: Path) -> None:
    spec = good(tmp_path, f"{PYTHON}env:\nconfig:\nmodels:\nprocesses:\ngpu_version:\nserver_side_batching:\n")
    assert (spec.env, spec.config, spec.models, spec.processes, spec.batching) == ({}, {}, None, 1, None)


def test_keys_of_the_config_may_be_numbers(tmp_path: Path) -> None:
    spec = good(tmp_path, f"{PYTHON}config: {{0: cat, 1: dog, 2.5: cow}}\n")
    assert spec.config == {0: "cat", 1: "dog", 2.5: "cow"}


def test_all_mistakes_are_reported_with_their_lines(tmp_path: Path) -> None:
    text = """type: pyton
serve_port: 70000
processes: 0
threads_per_process: one
max_concurrency: -1
log_level: verbose
python_path: nowhere
path: other.py
protobuf_path: my.proto
server_side_batching:
  max_batch_size: 0.5
  batch_interval_seconds: 0
env:
  A: [1]
config: 3
gpu: maybe
"""
    problems = wrong(tmp_path, text)
    assert [(problem.line, problem.path, problem.expected, problem.found) for problem in problems] == [
        (1, "type", "python or tensorflow", '"pyton"'),
        (2, "serve_port", "an integer of 1 to 65535", "70000"),
        (3, "processes", "an integer of 1 or more", "0"),
        (4, "threads_per_process", "an integer of 1 or more", '"one"'),
        (5, "max_concurrency", "an integer of 0 or more", "-1"),
        (6, "log_level", "debug or info or warning or error", '"verbose"'),
        (7, "python_path", f"the folder {tmp_path / 'nowhere'}", '"nowhere"'),
        (8, "path", f"the file {tmp_path / 'other.py'} or the file {tmp_path / 'nowhere' / 'other.py'}", '"other.py"'),
        (9, "protobuf_path", f"the file {tmp_path / 'my.proto'}", '"my.proto"'),
        (10, "server_side_batching", "", ""),
        (11, "server_side_batching.max_batch_size", "an integer of 1 or more", "0.5"),
        (12, "server_side_batching.batch_interval_seconds", "a number above 0", "0"),
        (14, "env.A", "a text, a number or a boolean", "[1]"),
        (15, "config", "a mapping of keys to values", "3"),
        (16, "gpu", "true or false", '"maybe"'),
    ]
    assert problems[0].suggestion == "did you mean 'python'?"
    assert {problem.file for problem in problems} == {str(tmp_path / "nucleus.yaml")}


@pytest.mark.parametrize(("interval", "expected"), [("1", 1.0), ("0.25", 0.25), ("1e-3", 0.001), ("'2'", 2.0)], ids=str)
def test_an_interval_may_be_any_number(tmp_path: Path, interval: str, expected: float) -> None:
    batching = f"server_side_batching: {{max_batch_size: 1, batch_interval_seconds: {interval}}}\n"
    assert good(tmp_path, PYTHON + batching).batching == ProjectBatching(max_batch_size=1, interval_seconds=expected)


@pytest.mark.parametrize("interval", ["0", "-1", ".inf", ".nan", "true", "soon", "[1]"])
def test_an_interval_that_is_no_time_is_refused(tmp_path: Path, interval: str) -> None:
    batching = f"server_side_batching: {{max_batch_size: 1, batch_interval_seconds: {interval}}}\n"
    assert problems_of(tmp_path, PYTHON + batching) == [
        (3, "server_side_batching.batch_interval_seconds", "the value cannot be used")
    ]


@pytest.mark.parametrize(
    ("kind", "keys", "problems"),
    [
        ("tensorflow", "", "1 : the type tensorflow needs the key 'models'"),
        (
            "tensorflow",
            "multi_model_reloading: {dir: s3://b/a}",
            "3 multi_model_reloading: the key is for the type python",
        ),
        (
            "tensorflow",
            f"gpu_version: {{cuda: 11.1, cudnn: 8}}\n{_MODELS}",
            "3 gpu_version: the key is for the type python",
        ),
        ("python", "tfs_version: 2.13.0", "3 tfs_version: the key is for the type tensorflow"),
        ("python", "tfs_container_dns: tfs", "3 tfs_container_dns: the key is for the type tensorflow"),
        ("python", f"protobuf_path: a.proto\n{_ONE}", "4 server_side_batching: gRPC requests are not batched"),
        ("python", "config: {a: 1, a: 2}", "3 config.a: the key is given twice"),
        ("python", "path: b.py", "3 path: the key is given twice"),
        (
            "python",
            "models: {dir: s3://b/a}\nmulti_model_reloading: {dir: s3://b/a}",
            "3 models: duplicate of 'multi_model_reloading' for the type python",
        ),
        (
            "python",
            f"processes: 2\n{_CACHED}",
            "3 processes: the cached models of 'multi_model_reloading' require a single process",
        ),
        ("python", "gpu: true", "3 gpu: a GPU needs the key 'gpu_version'"),
        ("python", "gpu_version: {cuda: 11.1, cudnn: 8}", "3 gpu_version: the key requires 'gpu: true'"),
        ("python", "gpu: true\ngpu_version: {cuda: 11.1}", "4 gpu_version: the key 'cudnn' is missing"),
        ("python", "dependencies: {pip: ../r.txt}", "3 dependencies.pip: only the project's folder is in the image"),
        ("python", "dependencies: {shell: /r.sh}", "3 dependencies.shell: only the project's folder is in the image"),
        ("python", "py_version: [3]", "3 py_version: the value cannot be used"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, kind: str, keys: str, problems: str) -> None:
    found = problems_of(tmp_path, f"type: {kind}\npath: handler.py\n{keys}\n", a__proto="")
    assert "\n".join(f"{line} {path}: {message}" for line, path, message in found) == problems


@pytest.mark.parametrize(
    ("kind", "keys", "suggestion"),
    [
        ("python", f"{_BATCHING}\nthreads_per_process: 4", "set 'threads_per_process' to 8 for both"),
        ("python", "threads_per_proces: 4", "did you mean 'threads_per_process'?"),
        ("python", "models: {dir: s3://b/a}", "write 'multi_model_reloading'"),
        ("python", "multi_model_reloading: {dir: s3://b/a, signature_key: k}", ""),
        ("python", "multi_model_reloading: {paths: [{name: b, path: s3://b/c, signature_key: d}]}", ""),
        ("python", "multi_model_reloading: {dir: stock}", "models are served once it exists"),
        ("python", "py_version: 3.10", "the image gets Python 3.11; supported: 3.11 to 3.13"),
        (
            "tensorflow",
            f"tfs_version: 2.3.0\n{_MODELS}",
            "the image gets no TensorFlow unless the requirements name one; supported: 2.12 or newer",
        ),
        (
            "python",
            "gpu_version: {cuda: 10.2, cudnn: 7}\ngpu: true",
            "its images are too old for OpenVINO; supported: 11.0 or newer",
        ),
    ],
)
def test_a_warning_has_a_suggestion(tmp_path: Path, kind: str, keys: str, suggestion: str) -> None:
    _, warnings = read_project(write(tmp_path, f"type: {kind}\npath: handler.py\n{keys}\n"))
    assert [(each.line, each.severity, each.suggestion) for each in warnings] == [(3, "warning", suggestion)]
    assert warnings[0].path.partition(".")[0] == keys.partition(":")[0]


@pytest.mark.parametrize(
    ("text", "missing", "suggestions"),
    [
        ("# nothing yet\npth: handler.py\n", ["2 type", "2 path"], ["add it", "rename 'pth' to 'path'"]),
        (
            f"{PYTHON}server_side_batching:\n  max_batchsize: 4\n",
            ["3 batch_interval_seconds", "4 max_batch_size"],
            ["add it", "rename 'max_batchsize' to 'max_batch_size'"],
        ),
    ],
    ids=["project", "batching"],
)
def test_missing_keys_are_reported_where_they_are_misspelt(
    tmp_path: Path, text: str, missing: list[str], suggestions: list[str]
) -> None:
    problems = wrong(tmp_path, text)
    assert [f"{problem.line} {problem.message.split(chr(39))[1]}" for problem in problems] == missing
    assert [problem.suggestion for problem in problems] == suggestions
    assert all(problem.message.endswith(" is missing") for problem in problems)


def test_the_handler_may_lie_in_the_python_path(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "deep.py").touch()
    (tmp_path / "src" / "handler.py").touch()
    text = "type: python\npython_path: src\npath: {}\n"
    assert good(tmp_path, text.format("deep.py")).handler_path == tmp_path / "src" / "deep.py"
    assert good(tmp_path, text.format("handler.py")).handler_path == tmp_path / "handler.py"
    assert good(tmp_path, text.format("src/deep.py")).handler_path == tmp_path / "src" / "deep.py"


def test_dotenv_precedes_env_and_may_refer_to_it(tmp_path: Path) -> None:
    spec = good(tmp_path, f"{PYTHON}env: {{A: one, B: two}}\n", __env='export B=three\nC="$A-$B"\n')
    assert spec.dotenv == {"B": "three", "C": "one-three"}
    assert spec.environment == {"A": "one", "B": "three", "C": "one-three"}


def test_a_path_that_no_system_has_is_not_there(tmp_path: Path) -> None:
    (problem,) = wrong(tmp_path, f"type: python\npath: {'x' * 10_000}\n")
    assert problem.message == "there is no such file"


def test_a_linked_file_belongs_to_its_own_folder(tmp_path: Path) -> None:
    write(tmp_path / "real")
    (tmp_path / "project").mkdir()
    for name in ("nucleus.yaml", "handler.py"):
        (tmp_path / "project" / name).symlink_to(tmp_path / "real" / name)
    spec, _ = read_project(tmp_path / "project")
    assert (spec.directory, spec.file) == (tmp_path / "project", tmp_path / "project" / "nucleus.yaml")
    assert spec.handler_path == tmp_path / "project" / "handler.py"


_KEYS = (
    *ProjectSpec.model_fields,
    "path",
    "multi_model_reloading",
    "gpu",
    "gpu_version",
    "dependencies",
    "server_side_batching",
    "py_version",
)
_INNER = ("path", "paths", "dir", "name", "cache_size", "disk_cache_size", "cuda", "cudnn", "pip", "max_batch_size")
_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates() | st.binary(max_size=3)
)
_VALUES = st.sampled_from(["python", "tensorflow", "handler.py", "s3://b/a", 1]) | st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_INNER) | st.dates(), inner, max_size=4)
    ),
    max_leaves=6,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES))
def test_any_values_are_a_project_or_problems(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("any")
    write(folder, yaml.safe_dump(values))
    try:
        _, problems = read_project(folder)
    except ConfigError as error:
        problems = list(error.problems)
    assert all(problem.line is not None for problem in problems)


def test_problems_of_dotenv_are_reported_with_the_others(tmp_path: Path) -> None:
    problems = wrong(tmp_path, "type: python\npath: none.py\n", __env="A=1\nB=$(date)\n")
    assert [(Path(problem.file).name, problem.line, problem.message) for problem in problems] == [
        ("nucleus.yaml", 2, "there is no such file"),
        (".env", 2, "command substitution is not supported; write the result"),
    ]


def test_a_mounted_project_has_no_port_and_processes(tmp_path: Path) -> None:
    write(tmp_path, f"{PYTHON}serve_port: 8081\n")
    spec, warnings = read_project(tmp_path, mounted_as="other")
    assert spec.name == "other"
    assert [(each.line, each.path) for each in warnings] == [(3, "serve_port")]
    write(tmp_path, f"{PYTHON}processes: 2\n")
    with pytest.raises(ConfigError, match=r"3: processes: handlers of config\.json share one process"):
        read_project(tmp_path, mounted_as="other")


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"type: python\n  path: x\n", 2, "mapping values are not allowed here"),
        (b"a: [1\n", 2, "while parsing a flow sequence"),
        (b"\ta: 1\n", 1, "found character '\\t'"),
        (b"a: \xff\n", None, "the file is not UTF-8"),
        (b"a: b\x00\n", 1, "is not allowed"),
        (b"config: !!python/object/apply:os.getcwd []\n", 1, "unknown tag"),
        (b"config: !mine 3\n", 1, "could not determine a constructor"),
        (b"a: " + b"[" * 5000 + b"\n", None, "levels of nesting"),
        (b"a: " + b"[" * 200 + b"]" * 200 + b"\n", 1, "levels of nesting"),
        (b"a: &a [*a]\n", 1, "levels of nesting"),
        (b"? [a]\n: 1\n", 1, "a key is a list or a mapping"),
        (b"<<: 3\n", 1, "only a mapping"),
        (b'a: "\\ud83d"\n', 1, "incomplete surrogate"),
        (b"a: 1\n---\na: 2\n", 2, "expected a single document"),
        (b"config: {when: 2024-13-01}\n", 1, "month must be in 1..12"),
    ],
    ids=range(15),
)
def test_a_file_that_is_no_yaml_is_one_problem(tmp_path: Path, content: bytes, line: int, message: str) -> None:
    write(tmp_path)
    (tmp_path / "nucleus.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_project(tmp_path)
    (problem,) = caught.value.problems
    assert problem.line == line
    assert message in problem.message


@pytest.mark.parametrize("content", ["", "# only a comment\n", "- a\n", "word\n"])
def test_a_file_without_keys_is_no_project(tmp_path: Path, content: str) -> None:
    (problem,) = wrong(tmp_path, content)
    assert problem.message == "the file contains no project"


def test_the_file_of_a_folder_has_either_ending(tmp_path: Path) -> None:
    write(tmp_path / "a")
    assert find_project_file(tmp_path / "a") == tmp_path / "a" / "nucleus.yaml"
    (tmp_path / "a" / "nucleus.yaml").rename(tmp_path / "a" / "nucleus.yml")
    assert find_project_file(tmp_path / "a") == tmp_path / "a" / "nucleus.yml"
    (tmp_path / "a" / "nucleus.yml").rename(tmp_path / "a" / "mine.yaml")
    assert find_project_file(tmp_path / "a") is None
    assert read_project(tmp_path / "a" / "mine.yaml")[0].file == tmp_path / "a" / "mine.yaml"
    assert find_project_file(tmp_path / "config.json") is None


def test_missing_files_are_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the folder is not a project \(expected nucleus.yaml or nucleus.yml"):
        read_project(tmp_path)
    with pytest.raises(ConfigError, match="the file cannot be read: No such file"):
        read_project(tmp_path / "nucleus.yaml")


# Models


def _models(spec: ProjectSpec) -> ModelsSpec:
    assert spec.models is not None
    return spec.models


def test_one_path_is_the_default_model(tmp_path: Path) -> None:
    models = _models(good(tmp_path, f"{TENSORFLOW}models: {{path: s3://bucket/a/, signature_key: predict}}\n"))
    assert models == ModelsSpec(
        section="models",
        kind="path",
        entries=(ModelEntry(name=DEFAULT_MODEL, path="s3://bucket/a/", signature_key="predict"),),
        signature_key="predict",
    )
    assert not models.is_cached


def test_several_paths_have_names_and_signatures(tmp_path: Path) -> None:
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


def test_local_folders_are_relative_to_the_project_and_urls_are_kept(tmp_path: Path) -> None:
    for name in ("stock", "my models"):
        (tmp_path / name).mkdir()
    url = f"file://{tmp_path}/my%20models"
    for written, read in (("stock", str(tmp_path / "stock")), (url, url)):
        assert _models(good(tmp_path, f"{PYTHON}multi_model_reloading: {{dir: '{written}'}}\n")).dir == read


@pytest.mark.parametrize(
    ("section", "problems"),
    [
        ("{}", "models: exactly one of 'path', 'paths' and 'dir' is required, found none"),
        (
            "{path: s3://b/a, dir: s3://b/c}",
            "models: exactly one of 'path', 'paths' and 'dir' is required, found 'path' and 'dir'",
        ),
        ("{dir: s3://b/a, cache_size: 3}", "models.cache_size: the key requires 'disk_cache_size'"),
        ("{dir: s3://b/a, disk_cache_size: 3}", "models.disk_cache_size: the key requires 'cache_size'"),
        (
            "{dir: s3://b/a, cache_size: 3, disk_cache_size: 2}",
            "models.cache_size: the memory cache must not exceed the disk cache",
        ),
        (
            "{path: s3://b/a, cache_size: 1, disk_cache_size: 2}",
            "models.cache_size: caching requires several models",
        ),
        (
            "{dir: s3://b/a, cache_size: 0, disk_cache_size: x}",
            "models.cache_size: the value cannot be used\nmodels.disk_cache_size: the value cannot be used",
        ),
        ("{dir: s3://b/a, latest_versions: 0}", "models.latest_versions: the value cannot be used"),
        ("{paths: []}", "models.paths: the list is empty"),
        ("{paths: {name: a}}", "models.paths: the value cannot be used"),
        ("{paths: [a]}", "models.paths[0]: the value cannot be used"),
        ("{paths: [{path: s3://b/a}]}", "models.paths[0]: the key 'name' is missing"),
        ("{paths: [{name: a}]}", "models.paths[0]: the key 'path' is missing"),
        ("{paths: [{name: a/b, path: s3://b/a}]}", "models.paths[0].name: invalid name"),
        (
            "{paths: [{name: a, path: s3://b/a}, {name: a, path: s3://b/c}]}",
            "models.paths[1].name: the name 'a' is used twice",
        ),
        ("{path: s3://bucket}", "models.path: bucket or folder missing"),
        ("{path: s3://bucket/}", "models.path: bucket or folder missing"),
        ("{path: s3:///a}", "models.path: bucket or folder missing"),
        ("{path: memory://}", "models.path: the URL has no folder"),
        ("{dir: [a]}", "models.dir: the value cannot be used"),
        ("3", "models: the value cannot be used"),
    ],
)
def test_wrong_models_are_refused(tmp_path: Path, section: str, problems: str) -> None:
    found = problems_of(tmp_path, f"{TENSORFLOW}models: {section}\n")
    assert "\n".join(f"{path}: {message}" for _, path, message in found) == problems


# Keys of images


def test_keys_that_serving_ignores_are_logged(tmp_path: Path) -> None:
    text = f"{TENSORFLOW}models: {{dir: s3://b/a}}\ngpu: true\npy_version: 3.12\ntfs_container_dns: tfs\n"
    with capture_logs() as logs:
        log_image_only_keys(good(tmp_path, text))
    images = ("key is for images only", "gpu"), ("key is for images only", "py_version")
    assert [(line["event"], line["key"]) for line in logs] == [*images, ("key has no effect", "tfs_container_dns")]
    assert logs[1]["reason"] == "handlers run in the server's Python"


def test_versions_of_images() -> None:
    pythons = ("3.6.9", "3.10", "3.11", "3.12.4", "3.13", "3.14", "4.0", "x")
    assert [supported_python(each) for each in pythons] == [None, None, "3.11", "3.12.4", "3.13", None, None, None]
    cudas = ("10.2", "11.0", "11.6.2", "11.7", "12.4.1", "x")
    assert [ubuntu_for_cuda(each) for each in cudas] == [None, "20.04", "20.04", "22.04", "22.04", None]
    assert [supported_tensorflow(each) for each in ("2.3.0", "2.12.0", "2.16.1", "3")] == [
        None,
        "2.12.0",
        "2.16.1",
        None,
    ]


# The expanded file


def test_the_expanded_file_has_every_default_of_its_type(tmp_path: Path) -> None:
    assert yaml.safe_load(to_yaml(good(tmp_path))) == {
        "type": "python",
        "py_version": "3.6.9",
        "gpu": False,
        "dependencies": {"pip": "requirements.txt", "conda": "conda-packages.txt", "shell": "dependencies.sh"},
        "serve_port": 8080,
        "env": {},
        "config": {},
        "python_path": ".",
        "path": "handler.py",
        "processes": 1,
        "threads_per_process": 1,
        "max_concurrency": 0,
        "log_level": "info",
        "use_local_cortex_libs": False,
    }


@pytest.mark.parametrize(
    "text",
    [
        f"{PYTHON}config: {{a: [1, {{b: ü}}]}}\nenv: {{A: 1}}\nserve_port: 1\nprocesses: 3\nlog_level: error\n",
        f"{PYTHON}server_side_batching: {{max_batch_size: 1, batch_interval_seconds: 2}}\n",
        f"{PYTHON}server_side_batching: {{max_batch_size: 1, batch_interval_seconds: 2, retry_singly: yes}}\n",
        f"{PYTHON}protobuf_path: a.proto\npython_path: src\n",
        f"{PYTHON}multi_model_reloading: {{dir: s3://b/a, cache_size: 1, disk_cache_size: 2, latest_versions: 3}}\n",
        f"{TENSORFLOW}models: {{path: s3://b/a, signature_key: k}}\ntfs_container_dns: tfs\n",
        f"{TENSORFLOW}models: {{paths: [{{name: a, path: s3://b/a}}, {{name: b, path: gs://b/c, signature_key: k}}]}}",
        f"{PYTHON}gpu: true\ngpu_version: {{cuda: 12.4.1, cudnn: 9}}\npy_version: 3.12\n",
    ],
    ids=range(8),
)
def test_the_expanded_file_is_the_same_project(tmp_path: Path, text: str) -> None:
    (tmp_path / "src").mkdir()
    before = good(tmp_path, text, a__proto="")
    after, _ = read_project(write(tmp_path, to_yaml(before)))
    default = "localhost" if before.type == "tensorflow" else None
    assert after.tfs_container_dns == (before.tfs_container_dns or default)
    image = before.image.model_copy(update={"keys": after.image.keys})
    assert after == before.model_copy(update={"image": image, "tfs_container_dns": after.tfs_container_dns})


# Dockerfiles


_TENSORFLOW = f"{TENSORFLOW}models: {{dir: s3://b/a}}\n"


def _made(folder: Path, text: str = PYTHON, **files: str) -> str:
    project, _ = read_project(write(folder / "iris", text, **files))
    return make_dockerfile(project, folder, "1.2.3")


def _install(dockerfile: str) -> list[str]:
    """Return the commands of the step that installs the requirements of the project."""
    step = re.search(r"^RUN set -e; \\\n((?:.*\\\n)*.*)", dockerfile, re.MULTILINE)
    return [] if step is None else [line.removesuffix("; \\").strip() for line in step[1].split("\n")]


def test_a_project_without_requirements_installs_the_server_alone(tmp_path: Path) -> None:
    text = _made(tmp_path)
    lines = text.splitlines()
    assert lines[0] == "FROM ubuntu:22.04"
    assert "conda create -y -n env python=3.11 pip" in text
    assert lines[-5:] == [
        "RUN pip install --no-cache-dir 'ovmstrio[handlers]==1.2.3'",
        "WORKDIR /src/project",
        'COPY ["iris/", "/src/project/"]',
        "EXPOSE 8080",
        'CMD ["ovms", "serve", "/src/project/nucleus.yaml"]',
    ]
    assert _install(text) == []


def test_the_shell_script_runs_before_conda_and_pip(tmp_path: Path) -> None:
    files = {"requirements__txt": "numpy\n", "dependencies__sh": "true\n", "__env": "A=2\n"}
    files["conda-packages__txt"] = "conda-forge::rdkit\n"
    text = _made(tmp_path, f"{PYTHON}env: {{A: 1, not-a-name: 2}}\n", **files)
    assert _install(text) == [
        "export A=1",
        "set -a",
        "source ./.env",
        "set +a",
        "bash -e dependencies.sh",
        "conda install -y -n env --file conda-packages.txt",
        "pip install --no-cache-dir -r requirements.txt",
        "pip install --no-cache-dir 'ovmstrio[handlers]==1.2.3'",
    ]


@pytest.mark.parametrize(
    ("files", "steps"),
    [
        (
            {"requirements__txt": "numpy\n"},
            [
                'COPY ["iris/requirements.txt", "/src/project/requirements.txt"]',
                "RUN set",
                'COPY ["iris/", "/src/project/"]',
            ],
        ),
        ({"requirements__txt": "numpy\n.\n"}, ['COPY ["iris/", "/src/project/"]', "RUN set"]),
        ({"dependencies__sh": "cp pip.conf /etc/\n"}, ['COPY ["iris/", "/src/project/"]', "RUN set"]),
    ],
    ids=["packages", "the project itself", "shell"],
)
def test_changed_code_repeats_the_install_step_only_if_it_is_needed(
    tmp_path: Path, files: dict[str, str], steps: list[str]
) -> None:
    assert re.findall(r"^(?:COPY .*|RUN set)", _made(tmp_path, **files), re.MULTILINE) == steps


def test_requirements_may_have_another_name(tmp_path: Path) -> None:
    text = _made(tmp_path, f"{PYTHON}dependencies: {{pip: my deps.txt}}\n", **{"my deps__txt": "numpy\n"})
    assert 'COPY ["iris/my deps.txt", "/src/project/my deps.txt"]' in text
    assert "pip install --no-cache-dir -r $'my deps.txt'" in _install(text)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("gpu_version: {cuda: 12.1.1, cudnn: 8}", "FROM nvidia/cuda:12.1.1-cudnn8-runtime-ubuntu22.04"),
        (
            "gpu_version: {cuda: 11.1, cudnn: 8, development_image: true}",
            "FROM nvidia/cuda:11.1-cudnn8-devel-ubuntu20.04",
        ),
        ("gpu_version: {cuda: 10.2, cudnn: 7}", "FROM nvidia/cuda:10.2-cudnn7-runtime-ubuntu18.04"),
    ],
)
def test_a_gpu_selects_a_cuda_image(tmp_path: Path, keys: str, expected: str) -> None:
    assert _made(tmp_path, f"{PYTHON}gpu: true\n{keys}\n").startswith(f"{expected}\n")


def test_a_tensorflow_project_has_openvinos_gpu_and_a_tensorflow_that_exists(tmp_path: Path) -> None:
    text = _made(tmp_path, f"{_TENSORFLOW}gpu: true\ntfs_version: 2.16.1\n")
    assert text.startswith("FROM ubuntu:22.04\n")
    assert "git intel-opencl-icd" in text
    assert any(line.endswith("|| pip install --no-cache-dir tensorflow-cpu==2.16.1") for line in _install(text))
    assert _install(_made(tmp_path, f"{_TENSORFLOW}tfs_version: 2.3.0\n")) == []


@pytest.mark.parametrize(
    ("text", "extras"),
    [
        (_TENSORFLOW, "handlers,s3"),
        (
            f"{PYTHON}multi_model_reloading: {{paths: [{{name: a, path: gs://b/a}}, {{name: b, path: S3://b/a}}]}}\n",
            "handlers,s3",
        ),
        (f"{PYTHON}multi_model_reloading: {{dir: gs://b/a}}\n", "handlers"),
    ],
    ids=["models", "paths", "no S3"],
)
def test_the_client_of_s3_is_installed_for_models_in_s3(tmp_path: Path, text: str, extras: str) -> None:
    assert f"'ovmstrio[{extras}]==1.2.3'" in _made(tmp_path, text)


def test_python_port_and_sources_of_the_server(tmp_path: Path) -> None:
    text = _made(tmp_path, f"{PYTHON}py_version: 3.12.4\nserve_port: 9\nuse_local_cortex_libs: true\n")
    assert "python=3.12.4 pip" in text
    assert "EXPOSE 9\n" in text
    assert "COPY --from=ovmstrio . /src/ovmstrio\nRUN pip install --no-cache-dir '/src/ovmstrio[handlers]'\n" in text
