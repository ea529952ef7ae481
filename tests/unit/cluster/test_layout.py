"""Groups of services: what `placement` says, what the services call, and what a cluster cannot serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ovmstrio.cluster.layout import ClusterLayout, lay_out, shard_names
from ovmstrio.config.ovms_json import parse_config
from ovmstrio.core.errors import ConfigError
from ovmstrio.runtimes.table import KINDS

MISSING = object()


def _model(name: str, placement: Any = MISSING, **settings: Any) -> dict[str, Any]:
    said = {} if placement is MISSING else {"placement": placement}
    return {"config": {"name": name, "base_path": f"/models/{name}", **said, **settings}}


def _pipeline(name: str, *models: str, placement: Any = MISSING) -> dict[str, Any]:
    nodes = [
        {
            "name": f"n{index}",
            "model_name": model,
            "type": "DL model",
            "inputs": [{"x": {"node_name": "request", "data_item": "x"}}],
            "outputs": [{"data_item": "y", "alias": "y"}],
        }
        for index, model in enumerate(models)
    ]
    said = {} if placement is MISSING else {"placement": placement}
    outputs = [{f"y{index}": {"node_name": f"n{index}", "data_item": "y"}} for index in range(len(models))]
    return {"name": name, "inputs": ["x"], "nodes": nodes, "outputs": outputs, **said}


def _laid_out(*models: dict[str, Any], pipelines: Any = ()) -> ClusterLayout:
    document = {"model_config_list": list(models), "pipeline_config_list": list(pipelines)}
    return lay_out(parse_config(KINDS.values(), json.dumps(document).encode(), Path("/c/config.json")), KINDS)


def _members(layout: ClusterLayout) -> dict[str, list[str]]:
    return {group.name: [service.name for service in group.services] for group in layout.groups}


def _refusals(*models: dict[str, Any], pipelines: Any = ()) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        _laid_out(*models, pipelines=pipelines)
    return [str(problem) for problem in raised.value.problems]


def test_each_service_has_a_group_of_its_own_behind_one_with_the_doors() -> None:
    """Without a word of placement a service is a group, and several have an ingress in front of them."""
    assert _members(_laid_out(_model("a"), _model("b"))) == {"a": ["a"], "b": ["b"], "ingress": []}


def test_an_only_group_has_the_doors_itself() -> None:
    """Nothing stands in front of it, which would cost a hop."""
    layout = _laid_out(_model("a", "g"), _model("b", "g"))
    assert _members(layout) == {"g": ["a", "b"]}
    assert layout.ingress.name == "g"


def test_services_may_be_placed_in_the_group_with_the_doors() -> None:
    """As a graph that is streamed to."""
    layout = _laid_out(_model("a"), _model("b", "ingress"))
    assert _members(layout) == {"a": ["a"], "ingress": ["b"]}
    assert layout.owners == {"a": "a", "b": "ingress"}


def test_callers_come_behind_what_they_call_and_know_its_group() -> None:
    """Whatever the order of the entries."""
    layout = _laid_out(_model("a", "far"), _model("b", "p"), pipelines=[_pipeline("p", "a", "b", placement="p")])
    assert list(_members(layout)) == ["far", "p", "ingress"]
    (group,) = (group for group in layout.groups if group.name == "p")
    assert group.called == {"a": "far"}


def test_what_entries_say_of_a_group_is_put_together() -> None:
    """Each may say a part."""
    layout = _laid_out(
        _model("a", {"group": "g", "replicas": 3}), _model("b", {"group": "g", "num_cpus": 0.5}), _model("c", "g")
    )
    (group,) = layout.groups
    assert (group.placement.replicas, group.placement.num_cpus, group.placement.resources) == (3, 0.5, None)


def test_entries_that_contradict_each_other_are_refused_with_their_places() -> None:
    """A group has one number of replicas."""
    (refusal,) = _refusals(_model("a", {"group": "g", "replicas": 3}), _model("b", {"group": "g", "replicas": 2}))
    assert 'the group "g" is given another replicas by another of its entries' in refusal
    assert "model_config_list[1].config.placement.replicas" in refusal


def test_groups_that_call_each_other_in_a_circle_are_refused() -> None:
    """Neither could start before the other."""
    pipelines = [_pipeline("p", "a", placement="one"), _pipeline("q", "b", placement="two")]
    (refusal,) = _refusals(_model("a", "two"), _model("b", "one"), pipelines=pipelines)
    assert "groups call each other in a circle: one, two; put what calls each other into one group" in refusal


def test_what_is_in_the_group_with_the_doors_cannot_be_called_from_others() -> None:
    """It stands in front of all of them."""
    refusals = _refusals(_model("a", "ingress"), pipelines=[_pipeline("p", "a")])
    assert any('"p" calls "a", which is in the group that has the doors' in refusal for refusal in refusals)


@pytest.mark.parametrize("many", [{"replicas": 2}, {"autoscaling": {"max_replicas": 2}}])
def test_what_one_process_counts_is_not_served_by_several(many: Any) -> None:
    """It is refused with the way out, and served by one."""
    (refusal,) = _refusals(_model("a", many, max_concurrency=2))
    assert '"a" has a max_concurrency, which one process counts, and its group several replicas' in refusal
    assert _members(_laid_out(_model("a", {"replicas": 1}, max_concurrency=2))) == {"a": ["a"]}


def test_calls_are_made_once_more_only_where_nobody_can_have_begun_what_counts() -> None:
    """Not where code of users runs, nor sequences go on, nor where another server may do either."""
    remote = {"config": {"name": "r", "remote": "grpc://127.0.0.1:1", "placement": "elsewhere"}}
    layout = _laid_out(
        _model("a"), _model("b", stateful=True), remote, _model("c", "both"), pipelines=[_pipeline("p", "a")]
    )
    assert {group.name: group.is_repeatable(KINDS) for group in layout.groups if group.services} == {
        "a": True,
        "b": False,
        "elsewhere": False,
        "both": True,
        "p": False,
    }


def test_sequences_are_shared_out_among_parts_of_a_group() -> None:
    """Each is a replica of its own, behind a group with the doors that knows them."""
    layout = _laid_out(_model("a", {"replicas": 3}, stateful=True))
    assert _members(layout) == {"a": ["a"], "ingress": []}
    assert [group.shards for group in layout.groups] == [3, 1]
    assert shard_names("a", 3) == ["a-0-of-3", "a-1-of-3", "a-2-of-3"]
    assert _laid_out(_model("a", {"replicas": 3})).groups[0].shards == 1


@pytest.mark.parametrize(
    "models",
    [
        [_model("a", {"autoscaling": {"max_replicas": 2}}, stateful=True)],
        [_model("a", {"group": "g", "replicas": 2}, stateful=True), _model("b", "g")],
        [_model("a", {"group": "ingress", "replicas": 2}, stateful=True), _model("b")],
    ],
)
def test_sequences_are_not_shared_out_where_their_replicas_are_not_known(models: Any) -> None:
    """Where their number changes, where other services have them as well, and behind the doors themselves."""
    (refusal,) = _refusals(*models)
    assert '"a" has sequences, which are shared out among a fixed number of replicas by their ids' in refusal


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ({"groups": "g"}, "placement.groups: the value cannot be used (expected a key of group, replicas"),
        ({"replicas": 0}, "placement.replicas: the value cannot be used (expected 1 or more, found 0)"),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas is not above max_replicas"),
        ({"replicas": 1, "autoscaling": {"max_replicas": 2}}, "either replicas or autoscaling, and not both"),
        ("a group", "placement: the value cannot be used"),
    ],
)
def test_what_a_placement_gets_wrong_is_told_with_its_place(placement: Any, text: str) -> None:
    """By name, with what was expected and found."""
    (refusal,) = _refusals(_model("a", placement))
    assert text in refusal
    assert "/c/config.json:1" in refusal


def test_placement_changes_nothing_of_what_is_loaded() -> None:
    """One server, which has no use for it, does not load anything again for it."""
    specs = [_laid_out(_model("a", placement)).groups[0].services[0] for placement in ("g", {"replicas": 7})]
    assert not specs[0].needs_reload(specs[1])
