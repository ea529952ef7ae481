from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from hashlib import sha256
from typing import Any

import httpx
import pytest
import trio
from joserfc import jws, jwt
from joserfc.jwk import ECKey, KeySet, OctKey, OKPKey, RSAKey

from ovmstrio.auth.authentication import Authentication, CallerDirectory, VerifiedClaims, request_credential
from ovmstrio.auth.gate import Gate
from ovmstrio.auth.revocable_streams import cancel_on_revocation
from ovmstrio.auth.tokens import FileKeys, IssuerKeys, JwtVerifier, TokenRules, parse_key_set
from ovmstrio.core.callers import Caller, Permission, Scopes, release_caller
from ovmstrio.core.connection import Peer
from ovmstrio.core.errors import ConfigError, MissingScope, Unauthenticated
from tests.support.callers import entry_of

CERTIFICATE = {"subject": ((("organizationName", "shop"),), (("commonName", "web"),)), "subjectAltName": ()}
NAMED = {"subject": (), "subjectAltName": (("DNS", "db.example"), ("URI", "spiffe://shop/db"))}


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Verifier:
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
    assert request_credential(headers) == expected


async def test_a_certificate_identifies_its_caller_unless_a_key_is_sent() -> None:
    directory = CallerDirectory()
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
    directory = CallerDirectory(clock)
    authentication = Authentication(directory, verifier.verify, clock)

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
    authentication.clear_cache()
    assert await name_of("good.ann.x") == "the ann of the file"
    with pytest.raises(Unauthenticated):
        await name_of("no token")
    assert verifier.verified == 5, "what has not the form of a token is not verified"


def _known(directory: CallerDirectory, key: str) -> Caller | None:
    found = directory.by_key(sha256(key.encode()).digest())
    return None if found is None else found[0]


async def test_unchanged_callers_keep_their_usage() -> None:
    directory = CallerDirectory()
    directory.replace([entry_of("shop", "read", concurrency=1), entry_of("gone")])
    known = _known(directory, "shop")
    assert known is not None
    directory.replace([entry_of("shop", "read", concurrency=1)])
    assert _known(directory, "shop") is known
    assert _known(directory, "gone") is None
    directory.replace([entry_of("shop", "read", concurrency=2)])
    assert _known(directory, "shop") is not known


async def test_a_verification_during_a_change_of_callers_is_not_cached() -> None:
    directory = CallerDirectory()

    class CacheClearingVerifier(_Verifier):
        async def verify(self, token: str) -> VerifiedClaims:
            authentication.clear_cache()
            return await super().verify(token)

    verifier = CacheClearingVerifier()
    authentication = Authentication(directory, verifier.verify, _Clock())
    for times in (1, 2):
        await authentication.identify([("x-api-key", "good.ann.x")], None)
        assert verifier.verified == times


# Long requests


HEADERS = (("authorization", "Bearer shop"),)


async def _admit(authentication: Authentication) -> Gate:
    gate = Gate(authentication)
    await gate.let_in(Permission.INFER, "", HEADERS, None)
    return gate


class _CountingAuthentication(Authentication):
    count = 0

    async def identify(self, *shown: object) -> Caller:
        self.count += 1
        return await super().identify(*shown)  # type: ignore[arg-type]


async def test_callers_are_identified_again_only_after_a_change() -> None:
    clock = _Clock()
    directory = CallerDirectory(clock)
    directory.replace([entry_of("shop", "infer:*", expires="1970-01-02")])
    authentication = _CountingAuthentication(directory, clock=clock)
    gate = await _admit(authentication)

    async def go_on() -> None:
        with cancel_on_revocation(Peer(revocable_streams=gate.revocable_streams), HEADERS):
            await gate.end_revoked()
            count = authentication.count
            for _ in range(100):
                await gate.end_revoked()
            assert authentication.count == count
            authentication.clear_cache()
            await gate.end_revoked()
            await trio.lowlevel.checkpoint()
            clock.now = 24 * 3600
            await gate.end_revoked()
            await trio.sleep_forever()

    with pytest.raises(Unauthenticated, match="unknown or expired"):
        await go_on()
    assert not gate.revocable_streams
    release_caller()


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
    directory = CallerDirectory()
    directory.replace([entry_of("shop", *before.split())])
    authentication = Authentication(directory)
    gate = await _admit(authentication)
    ended = ""
    try:
        with cancel_on_revocation(Peer(revocable_streams=gate.revocable_streams), HEADERS):
            directory.replace([entry_of("shop", *after.split())])
            authentication.clear_cache()
            await gate.end_revoked()
            await trio.lowlevel.checkpoint()
    except MissingScope as error:
        ended = error.scope
    assert ended == lost
    release_caller()


# Tokens


NOW = 1_000_000.0
ISSUER = "https://issuer.example"
KEY = ECKey.generate_key("P-256", {"kid": "first"})
NEXT = OKPKey.generate_key("Ed25519", {"kid": "next"})
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})
RULES = TokenRules(ISSUER, "ovms", 60)


def _public(*keys: Any) -> dict[str, Any]:
    return {"keys": [key.as_dict(private=False) for key in keys]}


def _token(key: Any = KEY, algorithm: str = "ES256", **claims: Any) -> str:
    claimed = {"sub": "ann", "iss": ISSUER, "aud": "ovms", "exp": NOW + 100, "scope": "openid infer:a* read"} | claims
    header = {"alg": algorithm, **({"kid": key.kid} if key.kid else {})}
    present = {name: value for name, value in claimed.items() if value is not None}
    return jwt.encode(header, present, key, algorithms=[algorithm])


def _tokens(*keys: Any, rules: TokenRules = RULES) -> JwtVerifier:
    return JwtVerifier(FileKeys(parse_key_set(_public(*(keys or (KEY, RSA))), "test")), rules, lambda: NOW)


@pytest.mark.parametrize(("key", "algorithm"), [(KEY, "ES256"), (RSA, "RS256"), (RSA, "PS512")])
async def test_a_token_of_a_known_key_has_its_subject_scopes_and_expiry(key: Any, algorithm: str) -> None:
    claims = await _tokens().verify(_token(key, algorithm))
    assert (claims.subject, claims.scopes) == ("ann", Scopes(("a*",), read=True))
    assert claims.expires_at == NOW + 160
    assert (await _tokens().verify(_token(key, algorithm, exp=NOW + 9999))).expires_at == NOW + 300


@pytest.mark.parametrize(
    ("claims", "scopes"),
    [
        ({"scope": None}, Scopes()),
        ({"scope": None, "scp": ["read", "x", 3]}, Scopes(read=True)),
        ({"scope": {"read": 1}}, Scopes()),
        ({"aud": ["x", "ovms"]}, Scopes(("a*",), read=True)),
        ({"exp": NOW - 59}, Scopes(("a*",), read=True)),
        ({"nbf": NOW + 59}, Scopes(("a*",), read=True)),
    ],
)
async def test_scopes_come_from_either_claim_and_clocks_may_differ(claims: dict[str, Any], scopes: Scopes) -> None:
    assert (await _tokens().verify(_token(**claims))).scopes == scopes


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": NOW - 61},
        {"exp": None},
        {"exp": "soon"},
        {"exp": float("nan")},
        {"nbf": NOW + 61},
        {"iss": "https://other.example"},
        {"iss": None},
        {"aud": "other"},
        {"aud": None},
        {"sub": None},
        {"sub": 3},
        {"sub": "two\nlines"},
        {"sub": "a bell \a"},
        {"sub": "a" * 257},
        {"exp": 10**400},
    ],
)
async def test_invalid_claims_are_refused_without_quoting_them(claims: dict[str, Any]) -> None:
    with pytest.raises(Unauthenticated, match="invalid token") as caught:
        await _tokens().verify(_token(**claims))
    assert "ann" not in caught.value.message
    assert "example" not in caught.value.message


def _forged() -> list[str]:
    stranger = ECKey.generate_key("P-256", {"kid": "first"})
    head, claims, signature = _token().split(".")
    secret = OctKey.import_key(json.dumps(_public(KEY)))
    unsigned = urlsafe_b64encode(b'{"alg":"none","kid":"first"}').decode().rstrip("=")
    return [
        _token(stranger),
        f"{head}.{claims}.",
        f"{head}.{claims}.{signature[:-6]}AAAAAA",
        f"{head}.{claims[:-4]}AAAA.{signature}",
        _token(secret, "HS256"),
        f"{unsigned}.{claims}.",
        _token(ECKey.generate_key("P-256", {"kid": "unknown"})),
        jws.serialize_compact({"alg": "ES256", "kid": "first"}, b"[" * 5000 + b"]" * 5000, KEY),
        "a.b.c",
        "..",
        "é.ü.x",
    ]


# Workers of pytest-xdist need the same names of tests, and tokens are random.
@pytest.mark.parametrize("index", range(len(_forged())))
async def test_forged_and_malformed_tokens_are_refused(index: int) -> None:
    token = _forged()[index]
    with pytest.raises(Unauthenticated, match="invalid token"):
        await _tokens().verify(token)


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"keys": 1}, {"keys": [1]}, {"keys": [{"kty": "EC"}]}, {"keys": [{"kty": "oct", "k": "AAAA"}]}],
)
def test_a_key_set_with_other_than_public_keys_is_refused(document: Any) -> None:
    with pytest.raises(ConfigError, match=r"keys\.json"):
        parse_key_set(document, "keys.json")


class _Issuer:
    def __init__(self) -> None:
        self.keys: Any = _public(KEY)
        self.name: Any = ISSUER
        self.paths: list[str] = []
        self.answers = trio.Event()
        self.answers.set()

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self._answer))

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        await self.answers.wait()
        if request.url.path == "/.well-known/openid-configuration":
            return httpx.Response(200, json={"issuer": self.name, "jwks_uri": f"{ISSUER}/keys"})
        return httpx.Response(503) if self.keys is None else httpx.Response(200, json=self.keys)


async def test_unknown_keys_are_fetched_at_most_every_half_minute(mock_clock: trio.testing.MockClock) -> None:
    issuer = _Issuer()
    tokens = JwtVerifier(IssuerKeys(f"{ISSUER}/", issuer.client), RULES, lambda: NOW)
    new = _token(NEXT, "Ed25519")
    assert (await tokens.verify(_token())).subject == "ann"
    for _ in range(3):
        with pytest.raises(Unauthenticated):
            await tokens.verify(new)
    assert len(issuer.paths) == 2
    issuer.keys = _public(NEXT)
    mock_clock.jump(31)
    assert (await tokens.verify(new)).subject == "ann"
    with pytest.raises(Unauthenticated):
        await tokens.verify(_token())
    assert len(issuer.paths) == 4


async def test_a_withdrawn_key_ends_within_an_hour(mock_clock: trio.testing.MockClock) -> None:
    issuer = _Issuer()
    tokens = JwtVerifier(IssuerKeys(ISSUER, issuer.client), RULES, lambda: NOW)
    await tokens.verify(_token())
    issuer.keys = None
    mock_clock.jump(3601)
    await tokens.verify(_token())
    issuer.keys = _public(NEXT)
    mock_clock.jump(31)
    with pytest.raises(Unauthenticated):
        await tokens.verify(_token())


@pytest.mark.parametrize(
    ("name", "keys"), [(ISSUER, None), (ISSUER, {"keys": 3}), ("https://x", _public(KEY)), (None, None), ([], None)]
)
async def test_an_unreachable_issuer_is_reported_as_such(name: Any, keys: Any) -> None:
    issuer = _Issuer()
    issuer.name, issuer.keys = name, keys
    with pytest.raises(Unauthenticated, match="token verification unavailable"):
        await JwtVerifier(IssuerKeys(ISSUER, issuer.client), RULES, lambda: NOW).verify(_token())


async def test_tokens_that_arrive_while_rotated_keys_are_fetched_wait_for_them(
    mock_clock: trio.testing.MockClock,
) -> None:
    issuer = _Issuer()
    tokens = JwtVerifier(IssuerKeys(ISSUER, issuer.client), RULES, lambda: NOW)
    await tokens.verify(_token())
    mock_clock.jump(31)
    issuer.keys, issuer.answers = _public(NEXT), trio.Event()
    subjects: list[str] = []

    async def verify(number: int) -> None:
        subjects.append((await tokens.verify(_token(NEXT, "Ed25519", sub=str(number)))).subject)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(verify, number)
            await trio.testing.wait_all_tasks_blocked()
        assert subjects == []
        issuer.answers.set()
    assert sorted(subjects) == ["0", "1", "2"]
    assert len(issuer.paths) == 4


async def test_concurrent_tokens_share_a_fetch_of_keys() -> None:
    issuer = _Issuer()
    tokens = JwtVerifier(IssuerKeys(ISSUER, issuer.client), RULES, lambda: NOW)
    subjects: list[str] = []

    async def verify(number: int) -> None:
        subjects.append((await tokens.verify(_token(sub=str(number)))).subject)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(verify, number)
    assert sorted(subjects) == ["0", "1", "2", "3", "4"]
    assert len(issuer.paths) == 2
    assert isinstance(await IssuerKeys(ISSUER, issuer.client).current(), KeySet)
