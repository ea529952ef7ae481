"""Refusals of the parts of one request, told together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ovmstrio.core.errors import InvalidRequest, MalformedJson, NotFound
from ovmstrio.core.gathered import MAX_ERRORS, Gathered


def test_one_refusal_is_told_as_it_is() -> None:
    """Its class and text are what whoever sent the request looks for."""
    wrong = Gathered()
    with wrong:
        raise MalformedJson("no JSON")
    with pytest.raises(MalformedJson, match=r"^no JSON$"):
        wrong.tell()


def test_nothing_is_told_where_nothing_is_wrong() -> None:
    """Parts that can be read leave no trace."""
    wrong = Gathered()
    with wrong:
        pass
    wrong.tell()
    assert not wrong


def test_several_are_told_together_in_their_order_and_in_bounds() -> None:
    """The first text begins; long ones behind it are cut, and of very many the rest is counted."""
    wrong = Gathered()
    for number in range(12):
        with wrong:
            raise InvalidRequest(f"input {number}{' is long' * 200 if number == 1 else ''}")
    first, second, *others = wrong.error().message.split(". Also: ")
    assert first == "input 0"
    assert second.startswith("input 1 is long")
    assert second.endswith("(1607 characters)")
    assert others == [*(f"input {number}" for number in range(2, 8)), "4 more"]


def test_a_list_of_wrong_members_is_read_up_to_a_limit() -> None:
    """The refusal that reaches the limit ends the request, also from within an inner block, and says so."""
    wrong, read = Gathered(), []

    def read_all() -> None:
        with wrong:
            for number in range(16_000):
                read.append(number)
                with wrong:
                    raise InvalidRequest(f"input {number}")

    with pytest.raises(InvalidRequest) as refused:
        read_all()
    assert len(read) == MAX_ERRORS
    assert refused.value.message.startswith("input 0. Also: input 1. Also: ")
    assert refused.value.message.endswith("24 more, and the rest of the request was not checked")


def test_errors_that_exist_already_are_taken_up_to_a_limit() -> None:
    """An iterator of errors makes no more of them than that."""
    made = []

    def errors() -> Iterator[InvalidRequest]:
        for number in range(16_000):
            made.append(number)
            yield InvalidRequest(f"input {number}")

    assert Gathered(errors())
    assert len(made) == MAX_ERRORS


def test_what_is_no_refusal_ends_the_request() -> None:
    """Something that is not there, or is broken, is not one of the things that are wrong with the request."""
    wrong = Gathered()
    with pytest.raises(NotFound), wrong:
        raise NotFound("no region of that name")
    assert not wrong
