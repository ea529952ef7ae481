"""The sample that searches documents, with the answers that it is known to give; needs a wheel in the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from platformdirs import user_cache_path

from ovmstrio_samples.catalog import BY_NAME
from ovmstrio_samples.preparing import prepare_sample
from ovmstrio_samples.search.client import Passage, passages, search
from tests.support.served_in_thread import serving_in_thread

_TEXT = """# Cars

The engine of the car does not start in winter.

# Music

She plays the violin beautifully.

## Weather

Tomorrow it will rain in the mountains.
"""


def test_documents_are_cut_at_headings_and_where_they_get_long(tmp_path: Path) -> None:
    """Each passage keeps the heading that it stands under."""
    (tmp_path / "a.md").write_text(_TEXT + "\nrain\n" * 300)
    (tmp_path / "b.md").write_text("no heading")

    found = list(passages(tmp_path))

    assert found[0] == Passage("a.md", "Cars", "The engine of the car does not start in winter.")
    assert found[1].heading == "Music"
    assert {each.heading for each in found[2:-1]} == {"Weather"}
    assert len(found) > 4
    assert found[-1] == Passage("b.md", "b", "no heading")


@pytest.mark.slow
def test_a_question_finds_the_passage_that_means_the_same(tmp_path: Path) -> None:
    """It has none of the passage's words."""
    sample, cache = BY_NAME["search"], user_cache_path("ovmstrio") / "wheels"
    if sample.wheel is None or not (cache / sample.wheel.filename).is_file():
        pytest.skip("not in the cache: ovms prepare --sample search")
    (folder,) = prepare_sample(sample, tmp_path / "models", 1, cache)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(_TEXT)
    questions = {"my vehicle is broken": "Cars", "a concert": "Music", "do I need an umbrella?": "Weather"}

    with serving_in_thread(model_name="search", model_path=folder, task="embeddings") as server:
        found = {each: search(server.rest, each, list(passages(tmp_path / "docs"))) for each in questions}

    assert {each: best.passage.heading for each, (best, *_) in found.items()} == questions
    for best, second, last in found.values():
        assert best.score > second.score > last.score
