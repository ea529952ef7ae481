"""Runner of all cases against a server, and its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import grpc

from ovmstrio.conformance.grpc_cases import GRPC_CASES
from ovmstrio.conformance.rest_cases import REST_CASES
from ovmstrio.conformance.target import Disagreement, TriedServer, Unsuitable


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one case; ``detail`` has the expected and actual values, or why the case was skipped."""

    interface: Literal["REST", "gRPC"]
    part: str
    rule: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str = ""


def run_cases(target: TriedServer) -> Iterator[CaseResult]:
    """Run the cases of the target's interfaces one after the other."""
    interfaces: tuple[tuple[Literal["REST", "gRPC"], Any, Any], ...] = (
        ("REST", REST_CASES, target.rest),
        ("gRPC", GRPC_CASES, target.grpc_address),
    )
    for interface, cases, address in interfaces:
        for part, rule, check in cases if address else ():
            try:
                check(target)
            except Unsuitable as error:
                yield CaseResult(interface, part, rule, "skipped", str(error))
            except Disagreement as error:
                yield CaseResult(interface, part, rule, "failed", str(error))
            except grpc.RpcError as error:
                yield CaseResult(interface, part, rule, "failed", f"expected success, got {_status(error)}")
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                text = f"expected the protocol's form, got an unreadable response: {type(error).__name__}: {error}"
                yield CaseResult(interface, part, rule, "failed", text)
            else:
                yield CaseResult(interface, part, rule, "passed")


def _status(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"


def summary(results: list[CaseResult]) -> str:
    """Return a line with the number of each outcome."""
    counts = Counter(each.outcome for each in results)
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"


def as_document(results: list[CaseResult]) -> list[dict[str, str]]:
    """Convert results for JSON."""
    return [asdict(each) for each in results]
