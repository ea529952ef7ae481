"""How much the process has in memory, and whose growth it is."""

from __future__ import annotations

from ovmstrio.observability.resident_memory import GrowthWatch, resident_bytes


def test_the_system_tells_what_the_process_has() -> None:
    """An interpreter with the libraries of the tests has some tens of megabytes, and no terabyte."""
    assert 10 * 2**20 < resident_bytes() < 2**40


def test_growth_is_told_of_who_was_alone_from_begin_to_end() -> None:
    """Neither who begins beside another one, nor who was alone at first; a process that shrinks has not grown."""
    sizes = iter([100, 130, 50, 200, 260, 1000, 900])
    watch = GrowthWatch(lambda: next(sizes))
    with watch.watching() as grown:
        assert grown() == 30
        with watch.watching() as other:
            assert (grown(), other()) == (None, None)
        assert grown() is None
    with watch.watching() as grown:
        assert grown() == 60
    with watch.watching() as grown:
        assert grown() == 0


def test_a_system_that_does_not_tell_is_not_taken_for_no_growth() -> None:
    """Nothing is known then."""
    with GrowthWatch(lambda: 0).watching() as grown:
        assert grown() is None
