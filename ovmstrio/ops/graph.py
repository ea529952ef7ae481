"""The graph of a pipeline's Ops, from its RequestOp to its ResponseOp, and what no pipeline can be made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.config_file import settings_of
from ovmstrio.ops.op import EXECUTOR_NAME, Op, RequestOp, ResponseOp
from ovmstrio.ops.settings import PipelineSettings
from ovmstrio.util.drawing import Drawing, DrawnBox, DrawnEdge, arrange

if TYPE_CHECKING:
    from ovmstrio.ops.settings import OpSettings

__all__ = ["OpGraph", "build", "draw"]

_Edges = Mapping[str, tuple[str, ...]]


def reach(names: Iterable[str], edges: _Edges) -> set[str]:
    """Give the names and everything that edges lead to from them."""
    found = list(dict.fromkeys(names))
    for name in found:
        found.extend(one for one in edges.get(name, ()) if one not in found)
    return set(found)


def unsatisfiable_join(jumper: str, targets: Iterable[str], inputs: _Edges, consumers: _Edges) -> str | None:
    """Tell what could go wrong after ``jumper`` has put its output in the place of that of ``targets``.

    An Op that has run before the jump and runs again needs all its inputs again; and none needs what the Ops that are
    jumped over would have made.  An Op that loops beside the one that jumps could run in two rounds at once.
    """
    targets = set(targets)
    before, after = reach([jumper], inputs), reach([jumper], consumers)
    again = reach((one for target in targets for one in consumers[target]), consumers)
    given = again | targets
    for name in inputs:
        if name not in again:
            continue
        missing = [one for one in inputs[name] if one not in given and (name in before or one in after)]
        if missing:
            return f"{name} would never get the output of {', '.join(missing)}"
    beside = [name for name in inputs if name in again and name not in before | after]
    if beside and again & before:
        return f"{', '.join(beside)} would run beside the loop"
    return None


@dataclass(frozen=True)
class OpGraph:
    """Ops in an order in which each comes after its inputs; the RequestOp is an input by the name ``@DAGExecutor``.

    Attributes:
        request: makes the input of the Ops that come first.
        response: makes the answer of the output of ``last``.
        ops: the Ops between them, by name.
        inputs: by an Op's name, whose outputs it gets.
        consumers: by the name of an Op or of the RequestOp, who gets its output.
        jumps: by the name of an Op that may jump, whose place its output may take.
        last: the name of the last Op.
        is_chain: whether no request is ever in two Ops at once.
    """

    request: RequestOp
    response: ResponseOp
    ops: Mapping[str, Op]
    inputs: Mapping[str, tuple[str, ...]]
    consumers: Mapping[str, tuple[str, ...]]
    jumps: Mapping[str, tuple[str, ...]]
    last: str

    @cached_property
    def is_chain(self) -> bool:  # noqa: D102 - an attribute of the class, see above
        takers = (*self.consumers.values(), *self.jumps.values())
        return all(len(names) <= 1 for names in takers)


def build(response_op: Op) -> OpGraph:
    """Make the graph of all Ops that lead to a ResponseOp.

    Raises:
        ConfigError: no pipeline can be made of them; every problem lists the Ops that it is about.
    """
    if not isinstance(response_op, ResponseOp):
        raise _error("a pipeline ends with a ResponseOp", "a ResponseOp", _named([response_op]))
    ends = response_op.get_input_ops()
    if len(ends) != 1:
        raise _error("a ResponseOp has exactly one input, the last Op", "one Op", _named(ends))
    if isinstance(ends[0], RequestOp):
        raise _error("a pipeline has at least one Op between RequestOp and ResponseOp", "an Op", _named(ends))
    found = _reachable(ends[0])
    _check_names(found)
    request = _only_source(found)
    return _joined(request, response_op, _sorted(found), ends[0].name)


def _error(message: str, expected: str, found: str) -> ConfigError:
    return ConfigError([Problem(message, expected=expected, found=found)])


def _named(ops: Iterable[Op]) -> str:
    return ", ".join(getattr(op, "name", type(op).__name__) for op in ops) or "no Op"


def _reachable(last: Op) -> list[Op]:
    found = [last]
    for op in found:
        found.extend(one for one in dict.fromkeys(op.get_input_ops()) if one not in found)
    return found


def _check_names(ops: list[Op]) -> None:
    counts = Counter(op.name for op in ops)
    twice = [f"{name} ({count} times)" for name, count in counts.items() if count > 1]
    if twice:
        raise _error("the Ops of a pipeline have names of their own", "each name once", ", ".join(twice))


def _only_source(ops: list[Op]) -> RequestOp:
    sources = [op for op in ops if not op.get_input_ops()]
    if not sources:
        raise _error("no Op is without inputs, so that the Ops form a cycle", "one RequestOp", _named(ops))
    if len(sources) > 1:
        raise _error("only one Op of a pipeline, its RequestOp, is without inputs", "one RequestOp", _named(sources))
    (source,) = sources
    if not isinstance(source, RequestOp):
        raise _error("a pipeline begins with a RequestOp", "a RequestOp", _named(sources))
    return source


def _sorted(ops: list[Op]) -> list[Op]:
    by_name = {op.name: op for op in ops}
    sorter = TopologicalSorter({op.name: [one.name for one in op.get_input_ops()] for op in ops})
    try:
        return [by_name[name] for name in sorter.static_order()]
    except CycleError as error:
        raise _error("the Ops form a cycle", "none", " -> ".join(error.args[1])) from error


def _joined(request: RequestOp, response: ResponseOp, ordered: list[Op], last: str) -> OpGraph:
    ops = {op.name: op for op in ordered if op is not request}
    inputs = {name: tuple(dict.fromkeys(one.name for one in op.get_input_ops())) for name, op in ops.items()}
    consumers = {
        producer: tuple(name for name, producers in inputs.items() if producer in producers)
        for producer in (EXECUTOR_NAME, *ops)
    }
    problems = [*_unable_to_join(ops, inputs), *_bad_jumps(ops, inputs, consumers)]
    if problems:
        raise ConfigError(problems)
    jumps = {name: tuple(one.name for one in targets) for name, op in ops.items() if (targets := op.get_jump_to_ops())}
    return OpGraph(request, response, ops, inputs, consumers, jumps, last)


def _unable_to_join(ops: Mapping[str, Op], inputs: Mapping[str, tuple[str, ...]]) -> list[Problem]:
    """Find Ops with several inputs that leave it to the default to make one feed of them."""
    return [
        Problem(
            f"Op {name} has several inputs ({', '.join(inputs[name])}), so that it must override preprocess",
            suggestion="override preprocess, or give it one input",
        )
        for name, op in ops.items()
        if len(inputs[name]) > 1 and type(op).preprocess is Op.preprocess
    ]


def _bad_jumps(
    ops: Mapping[str, Op], inputs: Mapping[str, tuple[str, ...]], consumers: Mapping[str, tuple[str, ...]]
) -> list[Problem]:
    problems = []
    for name, op in ops.items():
        targets = op.get_jump_to_ops()
        foreign = [one for one in targets if ops.get(one.name) is not one and not isinstance(one, RequestOp)]
        if foreign:
            message = f"Op {name} jumps to Ops that are not in the pipeline"
            problems.append(Problem(message, expected=f"some of {', '.join(ops)}", found=_named(foreign)))
        elif targets:
            join = unsatisfiable_join(name, [one.name for one in targets], inputs, consumers)
            if join is not None:
                problems.append(Problem(f"Op {name} jumps to {_named(targets)}: {join}"))
    return problems


def draw(graph: OpGraph, settings: PipelineSettings | None = None) -> Drawing:
    """Arrange a pipeline, with the settings that hold for its Ops; jumps lead up."""
    settings = settings or PipelineSettings()
    keys = {name: f"n{number}" for number, name in enumerate(graph.ops)} | {graph.request.name: "i0"}
    boxes = [_box(keys[name], settings_of(op, settings), settings) for name, op in graph.ops.items()]
    edges = [
        DrawnEdge(keys[producer], keys[name], "") for name, producers in graph.inputs.items() for producer in producers
    ]
    edges += [
        DrawnEdge(keys[name], keys[target], "jump", is_back=True)
        for name, targets in graph.jumps.items()
        for target in targets
    ]
    edges.append(DrawnEdge(keys[graph.last], "o0", ""))
    return arrange([DrawnBox("i0", "input", "request")], boxes, [DrawnBox("o0", "output", "response")], edges)


def _box(key: str, op: OpSettings, settings: PipelineSettings) -> DrawnBox:
    return DrawnBox(key, "node", op.name, _runs(op), tuple(_notes(op, settings)))


def _runs(op: OpSettings) -> str:
    """Say what an Op calls."""
    if op.server_endpoints:
        return f"{op.client_type or 'remote'} at {', '.join(op.server_endpoints)}"
    model = op.local_service_conf.model_config
    return "no model" if model is None else f"model {model}"


def _notes(op: OpSettings, settings: PipelineSettings) -> list[str]:
    """Say what is not as it is by default."""
    kind = "thread" if settings.dag.is_thread_op else "process"
    notes = [f"{op.concurrency} {kind}{'' if op.concurrency == 1 else 'es' if kind == 'process' else 's'}"]
    if op.batch_size > 1:
        wait = f", at most {op.auto_batching_timeout} ms" if op.batch_timeout_seconds else ""
        notes.append(f"batches of {op.batch_size}{wait}")
    if op.timeout_seconds:
        notes.append(f"times out after {op.timeout} ms{f', {op.retry} attempts' if op.retry > 1 else ''}")
    return notes
