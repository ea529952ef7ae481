from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.handlers.config.project_file import find_project_file, read_project
from ovmstrio.runtimes.handlers.config.project_spec import Dependencies, ImageSpec, ProjectBatching, ProjectSpec
from tests.support.examples import examples
from tests.support.projects import PYTHON, TENSORFLOW, good, told, write, wrong

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


def test_every_default_is_filled_in(tmp_path: Path) -> None:
    """A type and a path are enough."""
    folder = tmp_path / "iris"
    assert good(folder) == ProjectSpec(
        name="iris",
        directory=folder,
        file=folder / "nucleus.yaml",
        type="python",
        serve_port=8080,
        env={},
        dotenv={},
        config={},
        python_path=folder,
        handler_path=folder / "handler.py",
        protobuf_path=None,
        models=None,
        processes=1,
        threads_per_process=1,
        max_concurrency=0,
        batching=None,
        tfs_container_dns=None,
        log_level="info",
        image=ImageSpec(
            keys=(),
            py_version="3.6.9",
            tfs_version="2.3.0",
            gpu=False,
            gpu_version=None,
            dependencies=Dependencies(pip="requirements.txt", conda="conda-packages.txt", shell="dependencies.sh"),
            use_local_cortex_libs=False,
        ),
    )


def test_every_key_is_read(tmp_path: Path) -> None:
    """Each lands in the field of its meaning."""
    (tmp_path / "src").mkdir()
    spec = good(
        tmp_path,
        """
type: python
py_version: 3.12
serve_port: 9001
env:
  LEVEL: 3
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
""",
        my__proto="",
    )
    assert spec.image.py_version == "3.12"
    assert (spec.serve_port, spec.processes, spec.threads_per_process, spec.max_concurrency) == (9001, 2, 8, 32)
    assert spec.env == {"LEVEL": "3"}
    assert spec.config == {"names": ["a", "b"], "nested": {"depth": 1.5}}
    assert (spec.python_path, spec.handler_path) == (tmp_path / "src", tmp_path / "handler.py")
    assert (spec.protobuf_path, spec.protocol) == (tmp_path / "my.proto", "grpc")
    assert spec.models is not None
    assert (spec.models.kind, spec.models.dir) == ("dir", "s3://bucket/models")
    assert spec.log_level == "debug"


def test_keys_without_a_value_are_not_given(tmp_path: Path) -> None:
    """The schema of the documentation, whose keys are empty, is a fine beginning of a project."""
    spec = good(tmp_path, f"{PYTHON}env:\nconfig:\nmodels:\nprocesses:\ngpu_version:\nserver_side_batching:\n")
    assert (spec.env, spec.config, spec.models, spec.processes, spec.batching) == ({}, {}, None, 1, None)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """By their lines, with what was expected and found."""
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
        (2, "serve_port", "a whole number of 1 to 65535", "70000"),
        (3, "processes", "a whole number of 1 or more", "0"),
        (4, "threads_per_process", "a whole number of 1 or more", '"one"'),
        (5, "max_concurrency", "a whole number of 0 or more", "-1"),
        (6, "log_level", "debug or info or warning or error", '"verbose"'),
        (7, "python_path", f"the folder {tmp_path / 'nowhere'}", '"nowhere"'),
        (8, "path", f"the file {tmp_path / 'other.py'} or the file {tmp_path / 'nowhere' / 'other.py'}", '"other.py"'),
        (9, "protobuf_path", f"the file {tmp_path / 'my.proto'}", '"my.proto"'),
        (10, "server_side_batching", "", ""),
        (11, "server_side_batching.max_batch_size", "a whole number of 1 or more", "0.5"),
        (12, "server_side_batching.batch_interval_seconds", "a number of seconds above 0", "0"),
        (14, "env.A", "a text, a number, or a truth value", "[1]"),
        (15, "config", "a mapping of keys to values", "3"),
        (16, "gpu", "true or false", '"maybe"'),
    ]
    assert problems[0].suggestion == "did you mean 'python'?"
    assert {problem.file for problem in problems} == {str(tmp_path / "nucleus.yaml")}


@pytest.mark.parametrize(("interval", "expected"), [("1", 1.0), ("0.25", 0.25), ("1e-3", 0.001), ("'2'", 2.0)], ids=str)
def test_an_interval_may_be_any_number(tmp_path: Path, interval: str, expected: float) -> None:
    """A whole number is one too."""
    batching = f"server_side_batching: {{max_batch_size: 1, batch_interval_seconds: {interval}}}\n"
    assert good(tmp_path, PYTHON + batching).batching == ProjectBatching(max_batch_size=1, interval_seconds=expected)


@pytest.mark.parametrize("interval", ["0", "-1", ".inf", ".nan", "true", "soon", "[1]"])
def test_an_interval_that_is_no_time_is_refused(tmp_path: Path, interval: str) -> None:
    """Nothing would ever be called, or at once."""
    batching = f"server_side_batching: {{max_batch_size: 1, batch_interval_seconds: {interval}}}\n"
    assert told(tmp_path, PYTHON + batching) == [
        (3, "server_side_batching.batch_interval_seconds", "the value cannot be used")
    ]


def test_both_keys_of_batching_are_needed(tmp_path: Path) -> None:
    """A misspelt one is told as one mistake, at its place."""
    text = f"{PYTHON}server_side_batching:\n  max_batchsize: 4\n"
    problems = wrong(tmp_path, text)
    assert [(problem.line, problem.message, problem.suggestion) for problem in problems] == [
        (3, "the key 'batch_interval_seconds' is missing", "add it"),
        (4, "the key 'max_batch_size' is missing", "write 'max_batch_size' instead of 'max_batchsize'"),
    ]


def test_batches_above_the_threads_are_a_warning(tmp_path: Path) -> None:
    """They are served, unlike elsewhere."""
    batching = "server_side_batching: {max_batch_size: 8, batch_interval_seconds: 1}\n"
    spec, warnings = read_project(write(tmp_path, f"{PYTHON}threads_per_process: 4\n{batching}"))
    assert spec.batching == ProjectBatching(max_batch_size=8, interval_seconds=1.0)
    assert [(each.line, each.path, each.severity) for each in warnings] == [
        (4, "server_side_batching.max_batch_size", "warning")
    ]
    assert warnings[0].suggestion == "set 'threads_per_process' to 8 for both"


def test_batching_of_grpc_is_refused(tmp_path: Path) -> None:
    """It would be silently left out otherwise."""
    text = f"{PYTHON}protobuf_path: a.proto\nserver_side_batching: {{max_batch_size: 1, batch_interval_seconds: 1}}\n"
    assert told(tmp_path, text, a__proto="") == [(4, "server_side_batching", "requests of gRPC are not batched")]


def test_required_keys_are_missed(tmp_path: Path) -> None:
    """Both at once; a misspelt one is shown where it is."""
    problems = wrong(tmp_path, "# nothing yet\npth: handler.py\n")
    assert [(problem.line, problem.message, problem.suggestion) for problem in problems] == [
        (2, "the key 'type' is missing", "add it"),
        (2, "the key 'path' is missing", "write 'path' instead of 'pth'"),
    ]


def test_unknown_keys_are_warnings_with_a_suggestion(tmp_path: Path) -> None:
    """The project is served all the same."""
    spec, warnings = read_project(write(tmp_path, f"{PYTHON}threads_per_proces: 4\nzzz: 1\n"))
    assert spec.threads_per_process == 1
    assert [(each.line, each.path, each.severity, each.message) for each in warnings] == [
        (3, "threads_per_proces", "warning", "unknown key 'threads_per_proces', which has no effect"),
        (4, "zzz", "warning", "unknown key 'zzz', which has no effect"),
    ]
    assert warnings[0].suggestion == "did you mean 'threads_per_process'?"
    assert warnings[1].suggestion.startswith("known are type, serve_port, ")


def test_a_key_that_is_given_twice_is_an_error(tmp_path: Path) -> None:
    """Nobody can tell which one was meant."""
    assert told(tmp_path, f"{PYTHON}config: {{a: 1, a: 2}}\npath: b.py\n") == [
        (3, "config.a", "the key is given twice"),
        (4, "path", "the key is given twice"),
    ]


def test_keys_of_the_other_type_are_refused(tmp_path: Path) -> None:
    """For Python, TensorFlow Serving means nothing."""
    assert told(tmp_path, f"{PYTHON}tfs_container_dns: tfs\ntfs_version: 2.13.0\n") == [
        (3, "tfs_container_dns", "the key is for the type tensorflow"),
        (4, "tfs_version", "the key is for the type tensorflow"),
    ]


def test_a_tensorflow_project_needs_models(tmp_path: Path) -> None:
    """It has nothing to predict with otherwise."""
    assert told(tmp_path, TENSORFLOW) == [(1, "", "the type tensorflow needs the key 'models'")]


def test_the_handler_may_lie_in_the_python_path(tmp_path: Path) -> None:
    """The project's own folder comes first."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "deep.py").touch()
    (tmp_path / "src" / "handler.py").touch()
    text = "type: python\npython_path: src\npath: {}\n"
    assert good(tmp_path, text.format("deep.py")).handler_path == tmp_path / "src" / "deep.py"
    assert good(tmp_path, text.format("handler.py")).handler_path == tmp_path / "handler.py"
    assert good(tmp_path, text.format("src/deep.py")).handler_path == tmp_path / "src" / "deep.py"


def test_values_of_env_become_texts(tmp_path: Path) -> None:
    """As Python writes them; an empty one is not exported."""
    spec = good(tmp_path, f"{PYTHON}env: {{FLAG: true, COUNT: 3, RATE: 0.5, TEXT: a b, NONE: }}\n")
    assert spec.env == {"FLAG": "True", "COUNT": "3", "RATE": "0.5", "TEXT": "a b"}


def test_dotenv_comes_before_env(tmp_path: Path) -> None:
    """It may refer to what that exports."""
    spec = good(tmp_path, f"{PYTHON}env: {{A: one, B: two}}\n", __env='export B=three\nC="$A-$B"\n')
    assert spec.dotenv == {"B": "three", "C": "one-three"}
    assert spec.environment == {"A": "one", "B": "three", "C": "one-three"}


def test_a_path_that_no_system_has_is_not_there(tmp_path: Path) -> None:
    """However long it is."""
    (problem,) = wrong(tmp_path, f"type: python\npath: {'x' * 10_000}\n")
    assert problem.message == "there is no such file"


def test_a_linked_file_belongs_to_its_own_folder(tmp_path: Path) -> None:
    """As files are that are mounted into a container; so is a linked handler."""
    write(tmp_path / "real")
    (tmp_path / "project").mkdir()
    for name in ("nucleus.yaml", "handler.py"):
        (tmp_path / "project" / name).symlink_to(tmp_path / "real" / name)
    spec, _ = read_project(tmp_path / "project")
    assert (spec.directory, spec.file) == (tmp_path / "project", tmp_path / "project" / "nucleus.yaml")
    assert spec.handler_path == tmp_path / "project" / "handler.py"


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), _VALUES))
def test_any_values_are_a_project_or_problems(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    """Each with a line; nothing else is ever raised."""
    folder = tmp_path_factory.mktemp("any")
    write(folder, yaml.safe_dump(values))
    try:
        _, problems = read_project(folder)
    except ConfigError as error:
        problems = list(error.problems)
    assert all(problem.line is not None for problem in problems)


def test_problems_of_dotenv_are_told_with_the_others(tmp_path: Path) -> None:
    """Each with its own file and line."""
    problems = wrong(tmp_path, "type: python\npath: none.py\n", __env="A=1\nB=$(date)\n")
    assert [(Path(problem.file).name, problem.line, problem.message) for problem in problems] == [
        ("nucleus.yaml", 2, "there is no such file"),
        (".env", 2, "commands are not run; write their result"),
    ]


def test_a_project_beside_others_has_their_process_and_ports(tmp_path: Path) -> None:
    """It has the name that the configuration gives it."""
    write(tmp_path, f"{PYTHON}serve_port: 8081\n")
    spec, warnings = read_project(tmp_path, mounted_as="other")
    assert spec.name == "other"
    assert [(each.line, each.path) for each in warnings] == [(3, "serve_port")]
    write(tmp_path, f"{PYTHON}processes: 2\n")
    with pytest.raises(ConfigError, match="3: processes: a handler that is served beside others has no processes"):
        read_project(tmp_path, mounted_as="other")


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"type: python\n  path: x\n", 2, "mapping values are not allowed here"),
        (b"a: [1\n", 2, "while parsing a flow sequence"),
        (b"\ta: 1\n", 1, "found character '\\t'"),
        (b"a: \xff\n", None, "the file is not UTF-8"),
        (b"a: b\x00\n", 1, "is not allowed"),
        (b"config: !!python/object/apply:os.getcwd []\n", 1, "is not known"),
        (b"config: !mine 3\n", 1, "could not determine a constructor"),
        (b"a: " + b"[" * 5000 + b"\n", None, "levels of nesting"),
        (b"a: " + b"[" * 200 + b"]" * 200 + b"\n", 1, "levels of nesting"),
        (b"a: &a [*a]\n", 1, "levels of nesting"),
        (b"? [a]\n: 1\n", 1, "a key is a list or a mapping"),
        (b"<<: 3\n", 1, "only a mapping"),
        (b'a: "\\ud83d"\n', 1, "half of a character"),
        (b"a: 1\n---\na: 2\n", 2, "expected a single document"),
        (b"config: {when: 2024-13-01}\n", 1, "month must be in 1..12"),
    ],
    ids=range(15),
)
def test_a_file_that_is_no_yaml_is_one_problem(tmp_path: Path, content: bytes, line: int, message: str) -> None:
    """It names the line, and runs nothing that a tag asks for."""
    write(tmp_path)
    (tmp_path / "nucleus.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_project(tmp_path)
    (problem,) = caught.value.problems
    assert problem.line == line
    assert message in problem.message


@pytest.mark.parametrize("content", ["", "# only a comment\n", "- a\n", "word\n"])
def test_a_file_without_keys_is_no_project(tmp_path: Path, content: str) -> None:
    """An empty one is null."""
    (problem,) = wrong(tmp_path, content)
    assert problem.message == "the file holds no project"


def test_the_file_is_found_in_a_folder(tmp_path: Path) -> None:
    """Under either ending; any other YAML file must be named itself."""
    write(tmp_path / "a")
    assert find_project_file(tmp_path / "a") == tmp_path / "a" / "nucleus.yaml"
    (tmp_path / "a" / "nucleus.yaml").rename(tmp_path / "a" / "nucleus.yml")
    assert find_project_file(tmp_path / "a") == tmp_path / "a" / "nucleus.yml"
    (tmp_path / "a" / "nucleus.yml").rename(tmp_path / "a" / "mine.yaml")
    assert find_project_file(tmp_path / "a") is None
    assert read_project(tmp_path / "a" / "mine.yaml")[0].file == tmp_path / "a" / "mine.yaml"
    assert find_project_file(tmp_path / "config.json") is None


def test_what_is_not_there_is_one_problem(tmp_path: Path) -> None:
    """A folder without the file, and a file that does not exist."""
    with pytest.raises(ConfigError, match=r"the folder is no project \(expected nucleus.yaml or nucleus.yml"):
        read_project(tmp_path)
    with pytest.raises(ConfigError, match="the file cannot be read: No such file"):
        read_project(tmp_path / "nucleus.yaml")
