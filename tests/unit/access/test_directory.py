"""Who is known by what, and until when."""

from __future__ import annotations

from hashlib import sha256

import pytest

from ovmstrio.access.authentication import Authentication, VerifiedClaims, bearer_of
from ovmstrio.access.directory import Directory
from ovmstrio.core.callers import Caller, Scopes
from ovmstrio.core.errors import Unauthenticated
from tests.support.callers import entry_of

CERTIFICATE = {"subject": ((("organizationName", "shop"),), (("commonName", "web"),)), "subjectAltName": ()}
NAMED = {"subject": (), "subjectAltName": (("DNS", "db.example"), ("URI", "spiffe://shop/db"))}


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Verifier:
    """Takes tokens whose first part is good, and counts."""

    def __init__(self) -> None:
        self.verified = 0

    async def verify(self, token: str) -> VerifiedClaims:
        self.verified += 1
        if not token.startswith("good"):
            raise Unauthenticated("the token is not valid", is_wrong=True)
        return VerifiedClaims(token.split(".")[1], Scopes(read=True), 2000.0)


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ([("authorization", "Bearer abc")], "abc"),
        ([("authorization", "bearer  abc ")], "abc"),
        ([("x-api-key", "abc")], "abc"),
        ([("x-api-key", "other"), ("authorization", "Bearer abc")], "abc"),
        ([("authorization", "Basic abc")], ""),
        ([("authorization", "Bearer")], ""),
        ([], ""),
    ],
)
def test_a_key_is_shown_in_either_header(headers: list[tuple[str, str]], shown: str) -> None:
    """As a bearer's, whatever the case of the word, or alone."""
    assert bearer_of(headers) == shown


async def test_a_key_is_known_until_its_day_comes() -> None:
    """From which on it is as unknown as any other."""
    clock = _Clock()
    directory = Directory(clock)
    directory.replace([entry_of("shop", "read", expires="1970-01-02")])
    asked = Authentication(directory)
    assert (await asked.identify([("x-api-key", "shop")], None)).name == "shop"
    clock.now = 24 * 3600
    with pytest.raises(Unauthenticated, match="not known, or not any more"):
        await asked.identify([("x-api-key", "shop")], None)


async def test_a_certificate_names_its_caller_unless_a_key_is_shown() -> None:
    """By its common name or an alternative one; a wrong key is not made good by it."""
    directory = Directory()
    directory.replace([entry_of("w", certificate="web"), entry_of("d", certificate="spiffe://shop/db"), entry_of("k")])
    asked = Authentication(directory)
    assert (await asked.identify([], CERTIFICATE)).name == "w"
    assert (await asked.identify([], NAMED)).name == "d"
    assert (await asked.identify([("x-api-key", "k")], CERTIFICATE)).name == "k"
    for headers, certificate in (([("x-api-key", "wrong")], CERTIFICATE), ([], {}), ([], None)):
        with pytest.raises(Unauthenticated):
            await asked.identify(headers, certificate)


async def test_a_token_is_verified_once_until_it_expires_or_callers_change() -> None:
    """Then again; one that is not valid is never remembered."""
    clock, verifier = _Clock(), _Verifier()
    directory = Directory(clock)
    asked = Authentication(directory, verifier, clock)

    async def name_of(token: str) -> str:
        return (await asked.identify([("authorization", f"Bearer {token}")], None)).name

    assert [await name_of("good.ann.x") for _ in range(3)] == ["ann"] * 3
    assert verifier.verified == 1
    clock.now = 2000.0
    await name_of("good.ann.x")
    assert verifier.verified == 2
    for _ in range(2):
        with pytest.raises(Unauthenticated):
            await name_of("bad.ann.x")
    assert verifier.verified == 4
    directory.replace([entry_of("the ann of the file", "admin", subject="ann")])
    asked.forget_seen()
    assert await name_of("good.ann.x") == "the ann of the file"
    with pytest.raises(Unauthenticated):
        await name_of("no token")
    assert verifier.verified == 5, "what has not the form of a token is not verified"


def _known(directory: Directory, key: str) -> Caller | None:
    found = directory.by_key(sha256(key.encode()).digest())
    return None if found is None else found[0]


async def test_callers_that_stay_keep_what_they_have_used() -> None:
    """A file that is read again gives nobody more than it may have; those that went are unknown."""
    directory = Directory()
    directory.replace([entry_of("shop", "read", concurrency=1), entry_of("gone")])
    known = _known(directory, "shop")
    assert known is not None
    directory.replace([entry_of("shop", "read", concurrency=1)])
    assert _known(directory, "shop") is known
    assert _known(directory, "gone") is None
    directory.replace([entry_of("shop", "read", concurrency=2)])
    assert _known(directory, "shop") is not known


async def test_a_token_that_is_verified_while_callers_change_is_verified_again() -> None:
    """What was true when its verification began is remembered by nobody."""
    directory = Directory()

    class Changing(_Verifier):
        async def verify(self, token: str) -> VerifiedClaims:
            asked.forget_seen()
            return await super().verify(token)

    verifier = Changing()
    asked = Authentication(directory, verifier, _Clock())
    for times in (1, 2):
        await asked.identify([("x-api-key", "good.ann.x")], None)
        assert verifier.verified == times
