"""Reading ``serving_server_conf.prototxt``, and matching it with a model's tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.ops.predictor.local_model import map_aliases
from ovmstrio.runtimes.ops.predictor.model_config import CONFIG_FILE, ModelConfig, Variable, read_model_config

WHOLE = """
# made by hand
feed_var { name: "image" alias_name: 'picture' is_lod_tensor: false feed_type: 7 shape: 3 shape: 224 shape: 224 }
feed_var <
  name: "scale"
  feed_type: 1
  shape: [1, 2]
>
fetch_var { name: "scores.tmp_0" alias_name: "scores" is_lod_tensor: true fetch_type: 0 }
"""


def variables(*names: tuple[str, str]) -> tuple[Variable, ...]:
    """Make variables of names and aliases."""
    return tuple(Variable(name, alias, lod=False, kind=1, shape=(3,)) for name, alias in names)


def test_reads_everything(tmp_path: Path) -> None:
    """Names, aliases, types and shapes come in the file's order; without an alias the name is used."""
    (tmp_path / CONFIG_FILE).write_text(WHOLE, encoding="utf-8")

    config = read_model_config(tmp_path)

    assert config.feeds == (
        Variable("image", "picture", lod=False, kind=7, shape=(3, 224, 224)),
        Variable("scale", "scale", lod=False, kind=1, shape=(1, 2)),
    )
    assert config.fetches == (Variable("scores.tmp_0", "scores", lod=True, kind=0, shape=()),)
    assert [each.dtype for each in (*config.feeds, *config.fetches)] == [np.uint8, np.float32, np.int64]
    assert read_model_config(tmp_path / CONFIG_FILE) == config


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("feed_var { name: 3 }", [":1:", "is no model configuration"]),
        ('feed_var { name: "x"', ["is no model configuration"]),
        ("", ["no feed_var", "no fetch_var"]),
        ('feed_var { name: "x" feed_type: 99 } fetch_var { name: "y" }', ["x.feed_type", "found 99"]),
        ("feed_var { } fetch_var { }", ["a feed_var has no name", "a fetch_var has no name"]),
        (
            'feed_var { name: "x" alias_name: "a" } feed_var { name: "y" alias_name: "a" } fetch_var { name: "z" }',
            ["two feed_var are called 'a'"],
        ),
    ],
)
def test_lists_what_is_wrong(tmp_path: Path, text: str, messages: list[str]) -> None:
    """Every problem is told, with the file."""
    (tmp_path / CONFIG_FILE).write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        read_model_config(tmp_path)

    assert all(message in caught.value.message for message in [CONFIG_FILE, *messages])


def test_tells_that_it_is_missing(tmp_path: Path) -> None:
    """Without the file there is a way out."""
    with pytest.raises(ConfigError, match=f"there is no {CONFIG_FILE}; .* write it by hand"):
        read_model_config(tmp_path)


def test_aliases_go_by_name_first() -> None:
    """Names that the model has are matched whatever their order; the rest by position among what is left."""
    config = ModelConfig(variables(("b", "B"), ("a", "A")), variables(("gone_1", "P"), ("y", "Q"), ("gone_2", "R")))

    mapping = map_aliases(config, ["a", "b"], ["x", "y", "z"], "model")

    assert mapping.inputs == {"a": "A", "b": "B"}
    assert mapping.outputs == {"x": "P", "y": "Q", "z": "R"}


def test_outputs_may_be_left_out() -> None:
    """A model may give more than its description lists."""
    config = ModelConfig(variables(("a", "A")), variables(("y", "Y")))

    assert map_aliases(config, ["a"], ["x", "y"], "model").outputs == {"y": "Y"}


@pytest.mark.parametrize(
    ("feeds", "fetches", "message"),
    [
        ((("a", "A"),), (("y", "Y"),), "the model takes 'b' too, for which there is no feed_var"),
        ((("a", "A"), ("b", "B"), ("c", "C")), (("y", "Y"),), "not as many tensors as there are feed_var: 'c'"),
        ((("a", "A"), ("b", "B")), (("y", "Y"), ("z", "Z")), "not as many tensors as there are fetch_var: 'z'"),
    ],
)
def test_refuses_what_cannot_be_matched(
    feeds: tuple[tuple[str, str], ...], fetches: tuple[tuple[str, str], ...], message: str
) -> None:
    """A description with more tensors than the model, or fewer inputs, is refused."""
    with pytest.raises(ConfigError, match=message):
        map_aliases(ModelConfig(variables(*feeds), variables(*fetches)), ["a", "b"], ["y"], "model")
