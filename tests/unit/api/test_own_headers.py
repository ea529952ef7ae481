from __future__ import annotations

from collections.abc import Iterator

import pytest

from ovmstrio.api.access.own_headers import without_proof
from ovmstrio.core.callers import Caller, Scopes, current_caller

OTHER = ("accept", "a")


@pytest.fixture
def known(request: pytest.FixtureRequest) -> Iterator[None]:
    token = current_caller.set(Caller("shop", request.param, Scopes()) if request.param else None)
    yield
    current_caller.reset(token)


@pytest.mark.parametrize("known", ["key", "token"], indirect=True)
@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([("authorization", "Bearer k"), OTHER], [OTHER]),
        ([("authorization", "bearer  k"), OTHER], [OTHER]),
        ([("x-api-key", "k"), OTHER], [OTHER]),
        ([("authorization", "Basic own"), ("x-api-key", "k"), OTHER], [("authorization", "Basic own"), OTHER]),
        ([("authorization", "Bearer k"), ("x-api-key", "own")], [("x-api-key", "own")]),
        ([("authorization", "Bearer k"), ("x-api-key", "k")], []),
    ],
)
def test_only_the_credential_that_the_server_used_is_removed(
    known: None, given: list[tuple[str, str]], left: list[tuple[str, str]]
) -> None:
    assert without_proof(tuple(given)) == tuple(left)


@pytest.mark.parametrize("known", ["certificate", ""], indirect=True)
def test_headers_stay_if_the_caller_is_not_known_by_a_key(known: None) -> None:
    given = (("authorization", "Bearer own"), ("x-api-key", "own"), OTHER)
    assert without_proof(given) == given
