from __future__ import annotations

from collections.abc import Iterator

import pytest

from ovmstrio.core.errors import MAX_ERRORS, ErrorList, InvalidRequest, MalformedJson, NotFound


def test_a_single_refusal_is_raised_unchanged() -> None:
    wrong = ErrorList()
    with wrong:
        raise MalformedJson("no JSON")
    with pytest.raises(MalformedJson, match=r"^no JSON$"):
        wrong.raise_if_any()


def test_several_refusals_are_joined_in_order_and_bounded() -> None:
    wrong = ErrorList()
    for number in range(12):
        with wrong:
            raise InvalidRequest(f"input {number}{' is long' * 200 if number == 1 else ''}")
    first, second, *others = wrong.error().message.split(". Also: ")
    assert first == "input 0"
    assert second.startswith("input 1 is long")
    assert second.endswith("(1607 characters)")
    assert others == [*(f"input {number}" for number in range(2, 8)), "4 more"]


def test_invalid_members_are_read_up_to_a_limit() -> None:
    wrong, read = ErrorList(), []

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


def test_an_iterator_of_errors_is_read_up_to_a_limit() -> None:
    created = []

    def errors() -> Iterator[InvalidRequest]:
        for number in range(16_000):
            created.append(number)
            yield InvalidRequest(f"input {number}")

    assert ErrorList(errors())
    assert len(created) == MAX_ERRORS


def test_an_error_that_is_no_refusal_ends_the_request() -> None:
    wrong = ErrorList()
    with pytest.raises(NotFound), wrong:
        raise NotFound("no region of that name")
    assert not wrong
