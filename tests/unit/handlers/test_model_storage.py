from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ovmstrio.core.errors import ConfigError, ServerError, StorageFailure
from ovmstrio.handlers.models.model_cache import LruKeys, keep_latest
from ovmstrio.handlers.models.storage import (
    CopyMaker,
    ModelSource,
    open_sources,
    saved_model_problem,
)
from ovmstrio.handlers.models.version_index import (
    ModelKey,
    VersionFiles,
    VersionIndex,
    diff_indexes,
    is_version,
    versions_by_folder,
    versions_by_model,
    versions_in_folder,
)
from ovmstrio.stores.open_storage import open_storage
from ovmstrio.stores.storage import LocalStorage, StoredFile
from ovmstrio.telemetry.call_tracing import CallTracing
from ovmstrio.telemetry.spans import RecordedSpan, TraceSampler
from tests.support.examples import examples
from tests.support.model_projects import CountingStorage, Loads, library_over, models_in, several_models, write_model


def test_links_in_local_folders_are_followed(tmp_path: Path) -> None:
    write_model(tmp_path, "linked", "elsewhere")
    folder = write_model(tmp_path, "text", "up", "1")
    (tmp_path / "up" / "2").symlink_to(tmp_path / "elsewhere")
    (folder / "round").symlink_to(tmp_path / "up")
    (folder / "dangling").symlink_to(tmp_path / "nothing")
    files = {file.path: file for file in LocalStorage().list_files(str(tmp_path / "up"))}
    assert set(files) == {"1/model.txt", "2/model.txt"}
    assert (files["1/model.txt"].size, files["2/model.txt"].size) == (4, 6)


def test_a_local_location_may_be_a_url_a_file_or_missing(tmp_path: Path) -> None:
    write_model(tmp_path, "text", "a b")
    storage = open_storage("file:///")
    assert [file.path for file in storage.list_files(f"file://{tmp_path}/a%20b/")] == ["model.txt"]
    (itself,) = storage.list_files(str(tmp_path / "a b" / "model.txt"))
    assert versions_in_folder("m", [itself]) == {}
    assert storage.list_files(str(tmp_path / "nothing")) == []
    storage.close()


@pytest.mark.parametrize(
    ("location", "package", "hint"),
    [
        ("s3://bucket/m", "s3fs", r"pip install .*\[s3\]"),
        ("gs://bucket/m", "gcsfs", r"pip install .*\[gs\]"),
        ("hf://org/name", "huggingface_hub", r"pip install .*\[hub\]"),
        ("carrier-pigeon://loft/m", "fsspec.implementations.none", "carrier-pigeon://"),
    ],
)
def test_a_storage_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, location: str, package: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=hint):
        open_storage(location)


def test_locations_with_one_scheme_share_a_storage(tmp_path: Path) -> None:
    spec = several_models({"a": tmp_path / "a", "b": tmp_path / "b", "c": f"file://{tmp_path}/c"})
    first, second, third = open_sources(spec, open_storage)
    assert first.storage is second.storage is not third.storage
    assert [source.has(ModelKey("b", "1")) for source in (first, second)] == [False, True]


def test_a_failed_copy_is_removed(tmp_path: Path) -> None:
    write_model(tmp_path, "a", "up", "1", "inner")
    storage = CountingStorage()
    maker = CopyMaker(tmp_path / "down", [ModelSource("m", str(tmp_path / "up"), storage)])
    ((key, version),) = versions_in_folder("m", storage.list_files(str(tmp_path / "up"))).items()
    copy = maker.make(key, version)
    assert copy.folder.relative_to(tmp_path / "down").parts[1:] == ("m", "1")
    assert (copy.folder / "inner" / "model.txt").read_text() == "a"
    storage.failure = StorageFailure("away")
    with pytest.raises(StorageFailure, match="away"):
        maker.make(key, version)
    (tmp_path / "up" / "1" / "inner" / "model.txt").unlink()
    storage.failure = None
    with pytest.raises(StorageFailure, match="cannot be copied"):
        maker.make(key, version)
    assert len(list((tmp_path / "down").iterdir())) == 1
    maker.remove(copy)
    assert list((tmp_path / "down").iterdir()) == []


def test_a_copy_that_cannot_be_written_is_a_storage_failure(tmp_path: Path) -> None:
    (tmp_path / "down").touch()
    version = VersionFiles((StoredFile("a", "a", 1, "", 0.0),))
    with pytest.raises(StorageFailure, match=r"m:1 cannot be stored in .*down"):
        CopyMaker(tmp_path / "down", [ModelSource(None, "", LocalStorage())]).make(ModelKey("m", "1"), version)


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        (["saved_model.pb"], ""),
        (["saved_model.pb", "variables/variables.index", "variables/variables.data-00000-of-00001", "x"], ""),
        (["model.pb"], "needs saved_model.pb"),
        (["saved_model.pb", "variables/variables.data-00000-of-00001"], "not variables/variables.index"),
    ],
)
def test_a_saved_model_has_a_graph_and_the_index_of_its_variables(paths: list[str], problem: str) -> None:
    version = VersionFiles(tuple(StoredFile(path, path, 1, "", 0.0) for path in paths))
    found = saved_model_problem(version)
    assert (found is None) == (problem == "")
    assert problem in (found or "")


# Trees of models

_KEYS = st.builds(ModelKey, st.sampled_from(["a", "b-c", "d"]), st.sampled_from(["1", "2", "10"]))
_VERSIONS = [VersionFiles((StoredFile("a", "at/a", 1, mark, 1.5),)) for mark in ("old", "new", "newer")]
_TREES = st.dictionaries(_KEYS, st.sampled_from(_VERSIONS))


def _files(*paths: str, mark: str = "m", modified: float = 1.5) -> list[StoredFile]:
    return [StoredFile(path, f"at/{path}", 1, mark, modified) for path in paths]


def _names(tree: VersionIndex) -> dict[str, set[str]]:
    return {str(key): set(version.paths) for key, version in tree.items()}


@pytest.mark.parametrize(
    ("paths", "versions"),
    [
        (["model.pkl", "data.txt"], {"m:1": {"model.pkl", "data.txt"}}),
        (["9/a", "10/a", "10/b/c"], {"m:9": {"a"}, "m:10": {"a", "b/c"}}),
        (["1/a", "2/a", "README"], {"m:1": {"1/a", "2/a", "README"}}),
        (["1/a", "v2/a"], {"m:1": {"1/a", "v2/a"}}),
        (["1/a", "-2/a"], {"m:1": {"1/a", "-2/a"}}),
        (["1"], {"m:1": {"1"}}),
        (["007/a"], {"m:007": {"a"}}),
        ([""], {}),
        ([], {}),
    ],
)
def test_a_model_has_versions_if_all_its_folders_are_numbers(paths: list[str], versions: dict[str, set[str]]) -> None:
    assert _names(versions_in_folder("m", _files(*paths))) == versions


def test_every_folder_of_a_folder_is_a_model() -> None:
    tree = versions_by_folder(_files("text/a", "text-gen/1/a", "text-gen/2/a", "README.md"))
    assert _names(tree) == {"text:1": {"a"}, "text-gen:1": {"a"}, "text-gen:2": {"a"}}


def test_the_highest_number_is_the_newest() -> None:
    huge = "9" * 6000
    keys = [ModelKey(name, version) for version in ("9", "10", "007", huge, "0") for name in "ab"]
    expected = [huge, "10", "9", "007", "0"]
    assert versions_by_model(keys) == {name: tuple(ModelKey(name, version) for version in expected) for name in "ab"}


@pytest.mark.parametrize(("text", "is_one"), [("1", True), ("007", True), ("", False), ("-1", False), ("²", False)])
def test_a_version_is_a_plain_number(text: str, is_one: bool) -> None:
    assert is_version(text) is is_one


@pytest.mark.parametrize(
    "changed",
    [
        _files("a", "b", mark="other"),
        _files("a", "b", modified=1.500000001),
        _files("a", "c"),
        _files("a"),
        _files("a", "b", "c"),
    ],
)
def test_a_fingerprint_depends_on_content_time_and_names(changed: list[StoredFile]) -> None:
    (version,) = versions_in_folder("m", _files("a", "b")).values()
    (again,) = versions_in_folder("m", reversed(_files("a", "b"))).values()
    (other,) = versions_in_folder("m", changed).values()
    assert version.fingerprint == again.fingerprint != other.fingerprint
    assert version.timestamp == 1


@given(_TREES, _TREES)
def test_changes_lead_from_one_tree_to_the_other(old: VersionIndex, new: VersionIndex) -> None:
    changes = diff_indexes(old, new)
    made = {key: files for key, files in old.items() if key not in changes.removed}
    made |= {key: new[key] for key in changes.written}
    assert made == new
    assert set(changes.removed) <= old.keys()
    assert all(key not in old or old[key] != new[key] for key in changes.written)
    assert not set(changes.written) & set(changes.removed)
    assert diff_indexes(new, new) == diff_indexes({}, {})


# Kept versions


def _keys(text: str) -> frozenset[ModelKey]:
    return frozenset(ModelKey("m", version) for version in text.split())


@pytest.mark.parametrize(
    ("count", "broken", "loaded", "kept"),
    [
        (1, "", "", "10"),
        (2, "", "", "10 9"),
        (9, "", "", "10 9 2 1"),
        (1, "10", "", "10 9"),
        (1, "10 9 2 1", "", "10 9 2 1"),
        (1, "", "9", "10 9"),
        (1, "", "9 10", "10"),
        (1, "", "2 1", "10 2"),
        (2, "9", "1", "10 9 2 1"),
    ],
)
def test_the_highest_versions_are_kept(count: int, broken: str, loaded: str, kept: str) -> None:
    assert keep_latest(_keys("1 2 9 10"), count, failed=_keys(broken), loaded=_keys(loaded)) == _keys(kept)


_SETS = st.frozensets(st.builds(ModelKey, st.sampled_from("ab"), st.integers(1, 12).map(str)), max_size=12)


@given(_SETS, st.integers(1, 4), _SETS, _SETS)
def test_the_highest_and_enough_working_versions_are_kept(
    keys: frozenset[ModelKey], count: int, broken: frozenset[ModelKey], loaded: frozenset[ModelKey]
) -> None:
    kept = keep_latest(keys, count, failed=broken, loaded=loaded)
    assert kept <= keys
    for name in {key.name for key in keys}:
        versions = {key for key in keys if key.name == name}
        assert max(versions, key=lambda key: int(key.version)) in kept
        assert len(kept & versions - broken) >= min(count, len(versions - broken))
        assert bool(kept & versions & loaded) == bool(versions & loaded)


class _Usage(RuleBasedStateMachine):
    """State machine that compares the policy with lists ordered by last use."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded_keys, self.on_disk = LruKeys[str](2), LruKeys[str](3)
        self.memory: list[str] = []
        self.disk: list[str] = []
        self.leases: list[str] = []

    def _use(self, place: list[str], key: str) -> None:
        if key in place:
            place.remove(key)
        place.append(key)

    @rule(key=st.sampled_from("abcdef"))
    def load(self, key: str) -> None:
        self.leases.append(key)
        for place, kept in ((self.disk, self.on_disk), (self.memory, self.loaded_keys)):
            self._use(place, key)
            kept.add(key)
        self.evict()
        self.leases.remove(key)

    @rule(key=st.sampled_from("abcdef"))
    def use(self, key: str) -> None:
        for place, kept in ((self.disk, self.on_disk), (self.memory, self.loaded_keys)):
            kept.touch(key)
            if key in place:
                self._use(place, key)

    @rule(key=st.sampled_from("abcdef"))
    def lease(self, key: str) -> None:
        self.leases.append(key)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        self.leases.remove(data.draw(st.sampled_from(self.leases)))
        self.evict()

    @rule(key=st.sampled_from("abcdef"))
    def remove_from_storage(self, key: str) -> None:
        self.loaded_keys.drop(key)
        self.on_disk.drop(key)
        self.memory = [each for each in self.memory if each != key]
        self.disk = [each for each in self.disk if each != key]

    @rule()
    def evict(self) -> None:
        free = [key for key in self.memory if key not in self.leases]
        expected = free[: max(0, len(self.memory) - 2)]
        assert self.loaded_keys.evict(self.leases.__contains__) == expected
        self.memory = [key for key in self.memory if key not in expected]
        free = [key for key in self.disk if key not in self.leases and key not in self.memory]
        expected = free[: max(0, len(self.disk) - 3)]
        assert self.on_disk.evict(lambda key: key in self.leases or key in self.loaded_keys) == expected
        self.disk = [key for key in self.disk if key not in expected]
        if not self.leases:
            assert len(self.memory) <= 2
            assert len(self.disk) <= 3

    @invariant()
    def agrees(self) -> None:
        assert list(self.loaded_keys) == self.memory
        assert list(self.on_disk) == self.disk


TestUsage = _Usage.TestCase
TestUsage.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


# Traces

_PLACE = "memory://traced/models"


class _Sink:
    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def span_ended(self, span: RecordedSpan) -> None:
        self.spans.append(span)


@pytest.fixture
def stored() -> Iterator[None]:
    files = fsspec.filesystem("memory")
    for name in ("a", "b"):
        files.pipe(f"/traced/models/{name}/1/model.txt", name.encode())
    yield
    files.rm("/traced", recursive=True)


def _traced(sink: _Sink, sampler: str = "always_on") -> CallTracing:
    return CallTracing(TraceSampler(sampler), [sink], is_failure=lambda _: True, server_sinks=[sink])


@pytest.mark.usefixtures("stored")
async def test_requests_of_the_server_to_a_storage_have_their_own_traces(tmp_path: Path) -> None:
    sink = _Sink()
    start_root_span = _traced(sink).trace_server_request
    async with library_over(models_in(_PLACE), tmp_path, Loads(), start_root_span=start_root_span):
        pass
    assert sorted(span.name for span in sink.spans) == ["fetch model", "fetch model", "list models"]
    assert {(span.kind, span.attributes["url.full"]) for span in sink.spans} == {("client", _PLACE)}
    fetched = [span.attributes for span in sink.spans if span.name == "fetch model"]
    assert sorted(str(attributes["ovmstrio.model.name"]) for attributes in fetched) == ["a", "b"]
    assert len({span.trace for span in sink.spans}) == 3


@pytest.mark.usefixtures("stored")
async def test_a_model_that_a_call_waits_for_is_fetched_in_its_trace(tmp_path: Path) -> None:
    sink = _Sink()
    async with library_over(models_in(_PLACE, 1, 1), tmp_path, Loads()) as library:
        call = RecordedSpan("the call", [sink], 7)
        with call.as_current():
            assert (await library.client.aget_model("a")).text == "a"
    (span,) = sink.spans
    assert (span.name, span.trace, span.parent) == ("fetch model", 7, call.number)


async def test_failures_are_recorded_though_they_are_not_sampled() -> None:
    sink = _Sink()
    tracing = _traced(sink, "always_off")
    with tracing.trace_server_request("fine", {}):
        pass
    with pytest.raises(ServerError, match="no"), tracing.trace_server_request("fails", {"url.full": "s3://a"}):
        raise ServerError("no")
    with trio.CancelScope() as scope, tracing.trace_server_request("cancelled", {}):
        scope.cancel()
        await trio.lowlevel.checkpoint()
    (span,) = sink.spans
    assert (span.name, span.failure, span.attributes["url.full"]) == ("fails", "no", "s3://a")


async def test_secrets_of_a_location_are_not_traced(tmp_path: Path) -> None:
    sink = _Sink()
    with RecordedSpan("the call", [sink], 7).as_current():
        async with library_over(models_in("memory://me:secret@traced/models?token=secret"), tmp_path, Loads()):
            pass
    assert {span.attributes["url.full"] for span in sink.spans} == {_PLACE}
