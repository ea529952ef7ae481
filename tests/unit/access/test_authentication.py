"""Identifying callers: keys, certificates, tokens, and requests that run long."""

from __future__ import annotations

from hashlib import sha256

import pytest
import trio

from ovmstrio.access.authentication import Authentication, VerifiedClaims, bearer_of
from ovmstrio.access.directory import Directory
from ovmstrio.access.gate import Gate
from ovmstrio.core.callers import Caller, Need, Scopes, current_caller, leave_caller
from ovmstrio.core.errors import MissingScope, Unauthenticated
from ovmstrio.core.long_requests import long_requests, while_known
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
    ("headers", "expected"),
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
def test_a_key_is_found_in_either_header(headers: list[tuple[str, str]], expected: str) -> None:
    """As a bearer's, whatever the case of the word, or alone."""
    assert bearer_of(headers) == expected


async def test_a_key_is_unknown_after_it_expires() -> None:
    clock = _Clock()
    directory = Directory(clock)
    directory.replace([entry_of("shop", "read", expires="1970-01-02")])
    authentication = Authentication(directory)
    assert (await authentication.identify([("x-api-key", "shop")], None)).name == "shop"
    clock.now = 24 * 3600
    with pytest.raises(Unauthenticated, match="not known, or not any more"):
        await authentication.identify([("x-api-key", "shop")], None)


async def test_a_certificate_identifies_its_caller_unless_a_key_is_sent() -> None:
    directory = Directory()
    directory.replace([entry_of("w", certificate="web"), entry_of("d", certificate="spiffe://shop/db"), entry_of("k")])
    authentication = Authentication(directory)
    assert (await authentication.identify([], CERTIFICATE)).name == "w"
    assert (await authentication.identify([], NAMED)).name == "d"
    assert (await authentication.identify([("x-api-key", "k")], CERTIFICATE)).name == "k"
    for headers, certificate in (([("x-api-key", "wrong")], CERTIFICATE), ([], {}), ([], None)):
        with pytest.raises(Unauthenticated):
            await authentication.identify(headers, certificate)


async def test_a_valid_token_is_cached_until_it_expires_or_callers_change() -> None:
    clock, verifier = _Clock(), _Verifier()
    directory = Directory(clock)
    authentication = Authentication(directory, verifier, clock)

    async def name_of(token: str) -> str:
        return (await authentication.identify([("authorization", f"Bearer {token}")], None)).name

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
    authentication.forget_seen()
    assert await name_of("good.ann.x") == "the ann of the file"
    with pytest.raises(Unauthenticated):
        await name_of("no token")
    assert verifier.verified == 5, "what has not the form of a token is not verified"


def _known(directory: Directory, key: str) -> Caller | None:
    found = directory.by_key(sha256(key.encode()).digest())
    return None if found is None else found[0]


async def test_unchanged_callers_keep_their_usage() -> None:
    directory = Directory()
    directory.replace([entry_of("shop", "read", concurrency=1), entry_of("gone")])
    known = _known(directory, "shop")
    assert known is not None
    directory.replace([entry_of("shop", "read", concurrency=1)])
    assert _known(directory, "shop") is known
    assert _known(directory, "gone") is None
    directory.replace([entry_of("shop", "read", concurrency=2)])
    assert _known(directory, "shop") is not known


async def test_a_verification_during_a_change_of_callers_is_not_cached() -> None:
    directory = Directory()

    class Changing(_Verifier):
        async def verify(self, token: str) -> VerifiedClaims:
            authentication.forget_seen()
            return await super().verify(token)

    verifier = Changing()
    authentication = Authentication(directory, verifier, _Clock())
    for times in (1, 2):
        await authentication.identify([("x-api-key", "good.ann.x")], None)
        assert verifier.verified == times


# Long requests


HEADERS = (("authorization", "Bearer shop"),)


class _CountingAuthentication(Authentication):
    """Counts how often it is asked who somebody is."""

    count = 0

    async def identify(self, *shown: object) -> Caller:
        self.count += 1
        return await super().identify(*shown)  # type: ignore[arg-type]


async def test_callers_are_identified_again_only_after_a_change() -> None:
    now = [1000.0]
    directory = Directory(lambda: now[0])
    directory.replace([entry_of("shop", "infer:*", expires="1970-01-02")])
    authentication = _CountingAuthentication(directory, clock=lambda: now[0])
    gate = Gate(authentication)
    long_requests.set(gate.long_requests)
    await gate.let_in(Need.INFER, "", HEADERS, None)

    async def go_on() -> None:
        with while_known(HEADERS, None):
            await gate.end_unknown()
            count = authentication.count
            for _ in range(100):
                await gate.end_unknown()
            assert authentication.count == count
            authentication.forget_seen()
            await gate.end_unknown()
            await trio.lowlevel.checkpoint()
            now[0] = 200_000.0
            await gate.end_unknown()
            await trio.sleep_forever()

    with pytest.raises(Unauthenticated, match="not any more"):
        await go_on()
    assert not gate.long_requests
    leave_caller()


@pytest.mark.parametrize(
    ("before", "after", "lost"),
    [
        ("infer:a", "infer:a infer:b", ""),
        ("infer:a", "infer:a*", ""),
        ("infer:a read", "infer:a admin", ""),
        ("infer:a read", "infer:a", "read"),
        ("infer:a infer:b", "infer:b", "infer:a"),
    ],
)
async def test_a_caller_that_loses_a_scope_is_stopped_with_its_name(before: str, after: str, lost: str) -> None:
    directory = Directory()
    directory.replace([entry_of("shop", *before.split())])
    authentication = Authentication(directory)
    gate = Gate(authentication)
    long_requests.set(gate.long_requests)
    await gate.let_in(Need.INFER, "", HEADERS, None)
    ended = ""
    try:
        with while_known(HEADERS, None):
            directory.replace([entry_of("shop", *after.split())])
            authentication.forget_seen()
            await gate.end_unknown()
            await trio.lowlevel.checkpoint()
    except MissingScope as error:
        ended = error.scope
    assert ended == lost
    leave_caller()


async def test_requests_without_callers_are_not_tracked() -> None:
    assert current_caller.get() is None
    with while_known((), None):
        await trio.lowlevel.checkpoint()


def test_scopes_that_cover_all_lack_nothing() -> None:
    assert not Scopes.parse(["infer:*", "admin"]).lacks(Scopes.parse(["infer:x?", "read"]))
