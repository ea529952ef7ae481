"""Graph of a pipeline's Ops from RequestOp to ResponseOp, and the WebService that defines it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from ovmstrio.core.errors import ConfigError, Problem
from ovmstrio.ops.config_file import resolve_op_settings
from ovmstrio.ops.op import EXECUTOR_NAME, Op, RequestOp, ResponseOp
from ovmstrio.ops.settings import PipelineSettings
from ovmstrio.util.drawing import Drawing, DrawnBox, DrawnEdge, arrange

if TYPE_CHECKING:
    from ovmstrio.ops.settings import OpSettings

# ----------------------------------------------------------------------
# Graph
# ----------------------------------------------------------------------

_Edges = Mapping[str, tuple[str, ...]]


def reachable(names: Iterable[str], edges: _Edges) -> set[str]:
    """Return the names and all names reachable over the edges."""
    reached = list(dict.fromkeys(names))
    for name in reached:
        reached.extend(one for one in edges.get(name, ()) if one not in reached)
    return set(reached)


def jump_problem(jumper: str, targets: Iterable[str], inputs: _Edges, consumers: _Edges) -> str | None:
    """Return the problem of a jump from ``jumper`` to ``targets``, or None.

    An Op that ran before the jump and runs again needs all its inputs again, and no Op may need an output of the Ops
    that the jump skips.  An Op in parallel to a loop could run in two rounds at once.
    """
    targets = set(targets)
    before, after = reachable([jumper], inputs), reachable([jumper], consumers)
    again = reachable((one for target in targets for one in consumers[target]), consumers)
    given = again | targets
    for name in inputs:
        if name not in again:
            continue
        missing = [one for one in inputs[name] if one not in given and (name in before or one in after)]
        if missing:
            return f"{name} would never get the output of {', '.join(missing)}"
    parallel = [name for name in inputs if name in again and name not in before | after]
    if parallel and again & before:
        return f"{', '.join(parallel)} would run in parallel to the loop"
    return None


@dataclass(frozen=True)
class OpGraph:
    """Graph of Ops in topological order; the RequestOp is the input named ``@DAGExecutor``.

    Attributes:
        request: creates the input of the first Ops.
        response: creates the response from the output of ``last``.
        ops: Ops between request and response, by name.
        inputs: producers by Op name.
        consumers: consumers by name of the Op or RequestOp.
        jumps: jump targets by Op name.
        last: name of the last Op.
        is_chain: whether a request is never in two Ops at once.
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
    """Return the graph of all Ops that lead to a ResponseOp; ConfigError lists the problems with their Ops."""
    if not isinstance(response_op, ResponseOp):
        raise _error("a pipeline ends with a ResponseOp", "a ResponseOp", _names([response_op]))
    ends = response_op.get_input_ops()
    if len(ends) != 1:
        raise _error("a ResponseOp has exactly one input, the last Op", "one Op", _names(ends))
    if isinstance(ends[0], RequestOp):
        raise _error("a pipeline has at least one Op between RequestOp and ResponseOp", "an Op", _names(ends))
    reached = _reachable(ends[0])
    _check_names(reached)
    request = _only_source(reached)
    return _make_graph(request, response_op, _sorted(reached), ends[0].name)


def _error(message: str, expected: str, found: str) -> ConfigError:
    return ConfigError([Problem(message, expected=expected, found=found)])


def _names(ops: Iterable[Op]) -> str:
    return ", ".join(getattr(op, "name", type(op).__name__) for op in ops) or "no Op"


def _reachable(last: Op) -> list[Op]:
    reached = [last]
    for op in reached:
        reached.extend(one for one in dict.fromkeys(op.get_input_ops()) if one not in reached)
    return reached


def _check_names(ops: list[Op]) -> None:
    counts = Counter(op.name for op in ops)
    twice = [f"{name} ({count} times)" for name, count in counts.items() if count > 1]
    if twice:
        raise _error("Op names of a pipeline must be unique", "each name once", ", ".join(twice))


def _only_source(ops: list[Op]) -> RequestOp:
    sources = [op for op in ops if not op.get_input_ops()]
    if not sources:
        raise _error("every Op has inputs, so the Ops form a cycle", "one RequestOp", _names(ops))
    if len(sources) > 1:
        raise _error("only the RequestOp of a pipeline has no inputs", "one RequestOp", _names(sources))
    (source,) = sources
    if not isinstance(source, RequestOp):
        raise _error("a pipeline begins with a RequestOp", "a RequestOp", _names(sources))
    return source


def _sorted(ops: list[Op]) -> list[Op]:
    by_name = {op.name: op for op in ops}
    sorter = TopologicalSorter({op.name: [one.name for one in op.get_input_ops()] for op in ops})
    try:
        return [by_name[name] for name in sorter.static_order()]
    except CycleError as error:
        raise _error("the Ops form a cycle", "none", " -> ".join(error.args[1])) from error


def _make_graph(request: RequestOp, response: ResponseOp, ordered: list[Op], last: str) -> OpGraph:
    ops = {op.name: op for op in ordered if op is not request}
    inputs = {name: tuple(dict.fromkeys(one.name for one in op.get_input_ops())) for name, op in ops.items()}
    consumers = {
        producer: tuple(name for name, producers in inputs.items() if producer in producers)
        for producer in (EXECUTOR_NAME, *ops)
    }
    problems = [*_missing_preprocess(ops, inputs), *_bad_jumps(ops, inputs, consumers)]
    if problems:
        raise ConfigError(problems)
    jumps = {name: tuple(one.name for one in targets) for name, op in ops.items() if (targets := op.get_jump_to_ops())}
    return OpGraph(request, response, ops, inputs, consumers, jumps, last)


def _missing_preprocess(ops: Mapping[str, Op], inputs: Mapping[str, tuple[str, ...]]) -> list[Problem]:
    return [
        Problem(
            f"Op {name} has several inputs ({', '.join(inputs[name])}) and does not override preprocess",
            suggestion="override preprocess, or use one input",
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
            problems.append(Problem(message, expected=f"some of {', '.join(ops)}", found=_names(foreign)))
        elif targets:
            join = jump_problem(name, [one.name for one in targets], inputs, consumers)
            if join is not None:
                problems.append(Problem(f"Op {name} jumps to {_names(targets)}: {join}"))
    return problems


def draw(graph: OpGraph, settings: PipelineSettings | None = None) -> Drawing:
    """Return the drawing of a pipeline with its settings; jumps are back edges."""
    settings = settings or PipelineSettings()
    keys = {name: f"n{number}" for number, name in enumerate(graph.ops)} | {graph.request.name: "i0"}
    resolved = {name: resolve_op_settings(op, settings) for name, op in graph.ops.items()}
    boxes = [
        DrawnBox(keys[name], "node", op.name, _runs(op), tuple(_notes(op, settings))) for name, op in resolved.items()
    ]
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


def _runs(op: OpSettings) -> str:
    if op.server_endpoints:
        return f"{op.client_type or 'remote'} at {', '.join(op.server_endpoints)}"
    model = op.local_service_conf.model_config
    return "no model" if model is None else f"model {model}"


def _notes(op: OpSettings, settings: PipelineSettings) -> list[str]:
    kind = "thread" if settings.dag.is_thread_op else "process"
    notes = [f"{op.concurrency} {kind}{'' if op.concurrency == 1 else 'es' if kind == 'process' else 's'}"]
    if op.batch_size > 1:
        wait = f", at most {op.auto_batching_timeout} ms" if op.batch_timeout_seconds else ""
        notes.append(f"batches of {op.batch_size}{wait}")
    if op.timeout_seconds:
        notes.append(f"times out after {op.timeout} ms{f', {op.retry} attempts' if op.retry > 1 else ''}")
    return notes


# ----------------------------------------------------------------------
# WebService
# ----------------------------------------------------------------------

RunService = Callable[["WebService"], None]

_runners: list[RunService] = []
_default_runners: list[RunService] = []


def set_service_runner(runner: RunService | None) -> RunService | None:
    """Set what ``run_service`` does, such as serving or recording the service; return the previous runner."""
    before = _runners[0] if _runners else None
    _runners[:] = [] if runner is None else [runner]
    return before


def set_default_runner(runner: RunService) -> None:
    """Set what ``run_service`` does in a script run by Python: a higher layer starts the server."""
    _default_runners[:] = [runner]


class WebService:
    """Base class of services; scripts override :meth:`get_pipeline_response`.

    Args:
        name: service name in requests.

    Attributes:
        yml_file: configuration file, if any.
        yml_dict: configuration, if not a file.
        response_op: end of the prepared pipeline.
    """

    def __init__(self, name: str = "default_service") -> None:
        self.name = name
        self.yml_file: str | None = None
        self.yml_dict: Mapping[str, Any] | None = None
        self.response_op: ResponseOp | None = None

    def get_pipeline_response(self, read_op: Op) -> Op | None:
        """Return the last Op of a pipeline that starts with ``read_op``; override this."""
        del read_op
        return None

    def prepare_pipeline_config(self, yml_file: str | None = None, yml_dict: Mapping[str, Any] | None = None) -> None:
        """Create the Ops and set exactly one configuration; ValueError if that or the last Op is missing."""
        if (yml_file is None) == (yml_dict is None):
            raise ValueError("prepare_pipeline_config needs exactly one of yml_file and yml_dict")
        last = self.get_pipeline_response(RequestOp())
        if not isinstance(last, Op):
            raise ValueError(  # noqa: TRY004 - Paddle Serving's exception
                f"get_pipeline_response of service {self.name} must return the last Op, got {type(last).__name__}"
            )
        self.yml_file, self.yml_dict = yml_file, yml_dict
        self.response_op = last if isinstance(last, ResponseOp) else ResponseOp(input_ops=[last])

    def graph(self) -> OpGraph:
        """Return the graph of the prepared pipeline; ConfigError if it is not prepared or invalid."""
        if self.response_op is None:
            raise ConfigError([Problem(f"service {self.name}: call prepare_pipeline_config before run_service")])
        return build(self.response_op)

    def run_service(self) -> None:
        """Serve the pipeline until the server ends; SystemExit if it cannot start."""
        (_runners or _default_runners)[0](self)
