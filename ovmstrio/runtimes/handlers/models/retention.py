"""Which versions of models are kept where only the highest few are wanted: a policy without a clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ovmstrio.runtimes.handlers.models.tree import ModelKey, newest_first

__all__ = ["keep_latest"]


def keep_latest(
    keys: Iterable[ModelKey], count: int, *, broken: Collection[ModelKey], loaded: Collection[ModelKey]
) -> frozenset[ModelKey]:
    """Choose the highest versions of each model, so many of them that are good as far as is known.

    Args:
        keys: what there is.
        count: how many of a model are wanted.
        broken: those that could not be loaded, which take nobody's place.
        loaded: those that could; the highest of them stays until a higher one has shown that it can be loaded too.
    """
    versions: dict[str, list[str]] = {}
    for key in keys:
        versions.setdefault(key.name, []).append(key.version)
    kept: set[ModelKey] = set()
    for name, those in versions.items():
        ordered = [ModelKey(name, version) for version in newest_first(those)]
        proven = next((number for number, key in enumerate(ordered) if key in loaded), -1)
        good = [number for number, key in enumerate(ordered) if key not in broken]
        last = good[count - 1] if len(good) >= count else len(ordered) - 1
        kept.update(ordered[: last + 1])
        kept.update(ordered[proven : proven + 1])
    return frozenset(kept)
