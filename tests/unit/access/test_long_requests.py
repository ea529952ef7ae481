"""Requests that go on for long: who makes them is asked for only when that may have changed."""

from __future__ import annotations

import pytest
import trio

from ovmstrio.access.authentication import Authentication
from ovmstrio.access.directory import Directory
from ovmstrio.access.gate import Gate
from ovmstrio.core.callers import Caller, Need, Scopes, current_caller, leave_caller
from ovmstrio.core.errors import MissingScope, Unauthenticated
from ovmstrio.core.long_requests import long_requests, while_known
from tests.support.callers import entry_of

HEADERS = (("authorization", "Bearer shop"),)


class _Asked(Authentication):
    """Counts how often it is asked who somebody is."""

    count = 0

    async def identify(self, *shown: object) -> Caller:
        self.count += 1
        return await super().identify(*shown)  # type: ignore[arg-type]


async def test_nobody_is_asked_again_while_callers_stay_and_no_key_ends() -> None:
    """Looked at any number of times; once the key is over, its request ends."""
    now = [1000.0]
    directory = Directory(lambda: now[0])
    directory.replace([entry_of("shop", "infer:*", expires="1970-01-02")])
    authentication = _Asked(directory, clock=lambda: now[0])
    gate = Gate(authentication)
    long_requests.set(gate.long_requests)
    await gate.let_in(Need.INFER, "", HEADERS, None)

    async def go_on() -> None:
        with while_known(HEADERS, None):
            await gate.end_unknown()
            asked = authentication.count
            for _ in range(100):
                await gate.end_unknown()
            assert authentication.count == asked
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
async def test_who_may_do_less_is_told_what_is_missing(before: str, after: str, lost: str) -> None:
    """Who may do more goes on."""
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


async def test_where_nobody_is_known_nothing_is_kept() -> None:
    """As at the doors of a server without callers."""
    assert current_caller.get() is None
    with while_known((), None):
        await trio.lowlevel.checkpoint()


def test_scopes_that_cover_all_lack_nothing() -> None:
    """Whatever the others are called."""
    assert not Scopes.parse(["infer:*", "admin"]).lacks(Scopes.parse(["infer:x?", "read"]))
