from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovmstrio.runtimes.handlers.models.tree import (
    ModelKey,
    StoredFile,
    Tree,
    VersionFiles,
    diff,
    is_version,
    models_below,
    versions_by_model,
    versions_of,
)

_KEYS = st.builds(ModelKey, st.sampled_from(["a", "b-c", "d"]), st.sampled_from(["1", "2", "10"]))
_VERSIONS = [VersionFiles((StoredFile("a", "at/a", 1, mark, 1.5),)) for mark in ("old", "new", "newer")]
_TREES = st.dictionaries(_KEYS, st.sampled_from(_VERSIONS))


def _files(*paths: str, mark: str = "m", modified: float = 1.5) -> list[StoredFile]:
    return [StoredFile(path, f"at/{path}", 1, mark, modified) for path in paths]


def _names(tree: Tree) -> dict[str, set[str]]:
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
    """A stray file or folder makes the whole of it version 1; a lone file and nothing at all are no model."""
    assert _names(versions_of("m", _files(*paths))) == versions


def test_every_folder_of_a_folder_is_a_model() -> None:
    """Names may have dashes and begin like others; files beside the folders belong to none."""
    tree = models_below(_files("text/a", "text-gen/1/a", "text-gen/2/a", "README.md"))
    assert _names(tree) == {"text:1": {"a"}, "text-gen:1": {"a"}, "text-gen:2": {"a"}}


def test_the_highest_number_is_the_newest() -> None:
    """Versions are compared as numbers, however many digits they have."""
    huge = "9" * 6000
    keys = [ModelKey(name, version) for version in ("9", "10", "007", huge, "0") for name in "ab"]
    expected = [huge, "10", "9", "007", "0"]
    assert versions_by_model(keys) == {name: tuple(ModelKey(name, version) for version in expected) for name in "ab"}


@pytest.mark.parametrize(("text", "is_one"), [("1", True), ("007", True), ("", False), ("-1", False), ("²", False)])
def test_a_version_is_a_plain_number(text: str, is_one: bool) -> None:
    """Only ASCII digits make one."""
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
def test_a_fingerprint_sees_every_change(changed: list[StoredFile]) -> None:
    """Content, time, names and number of files all count, the order in which they are listed does not."""
    (version,) = versions_of("m", _files("a", "b")).values()
    (again,) = versions_of("m", reversed(_files("a", "b"))).values()
    (other,) = versions_of("m", changed).values()
    assert version.fingerprint == again.fingerprint != other.fingerprint
    assert version.timestamp == 1


@given(_TREES, _TREES)
def test_changes_lead_from_one_tree_to_the_other(old: Tree, new: Tree) -> None:
    """Applying what is written and removed to the old tree gives the new one, and nothing that stayed is in them."""
    changes = diff(old, new)
    made = {key: files for key, files in old.items() if key not in changes.removed}
    made |= {key: new[key] for key in changes.written}
    assert made == new
    assert set(changes.removed) <= old.keys()
    assert all(key not in old or old[key] != new[key] for key in changes.written)
    assert not set(changes.written) & set(changes.removed)
    assert diff(new, new) == diff({}, {})
