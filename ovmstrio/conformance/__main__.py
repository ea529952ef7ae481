"""The command: ``python -m ovmstrio.conformance URL``."""

from __future__ import annotations

import argparse
import json
import sys

import httpx

from ovmstrio.extras import Extra, install_command

try:
    from ovmstrio.conformance.run import as_document, run_cases, summary
    from ovmstrio.conformance.target import TriedServer
except ModuleNotFoundError as missing:
    if missing.name != "grpc":
        raise
    raise SystemExit(f"error: the test needs grpcio: {install_command(Extra.GRPC)}") from None


def main(arguments: list[str] | None = None) -> int:
    """Test a server and print a line per rule; return 0 if no case failed, 1 if one failed, 2 for wrong usage."""
    options = _parser().parse_args(arguments)
    rest, grpc = options.url.rstrip("/"), options.grpc
    if rest.startswith("grpc://"):
        rest, grpc = "", rest.removeprefix("grpc://")
    model = options.model or _first_model(rest)
    if not model:
        print("no model found in the server's repository index: give --model", file=sys.stderr)  # noqa: T201 - what a command says
        return 2
    with TriedServer(rest, grpc, model, options.open_size) as target:
        results = list(run_cases(target))
    if options.output == "json":
        print(json.dumps(as_document(results), indent=1))  # noqa: T201 - what the command is for
    else:
        for each in results:
            detail = f" ({each.detail})" if each.detail else ""
            print(f"{each.outcome:8}{each.interface:5}{each.part}: {each.rule}{detail}")  # noqa: T201 - likewise
        print(f"{model}: {summary(results)}")  # noqa: T201 - likewise
    return int(any(each.outcome == "failed" for each in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ovmstrio.conformance", description="Test a server of the Open Inference Protocol (v2)."
    )
    parser.add_argument("url", help="base URL of REST, or grpc://host:port to test only gRPC")
    parser.add_argument("--grpc", default="", help="host:port of gRPC, to test it in addition")
    parser.add_argument(
        "--model", default="", help="a model that accepts zeros; default: the first of the repository index"
    )
    parser.add_argument("--open_size", type=int, default=1, help="size of dynamic dimensions")
    parser.add_argument("--output", choices=("text", "json"), default="text", help="form of the results")
    return parser


def _first_model(rest: str) -> str:
    """Return the first model of the repository index, which is an optional extension; empty without one."""
    try:
        index = httpx.post(f"{rest}/v2/repository/index", json={"ready": True}, trust_env=False).json()
        return str(index[0]["name"])
    except (httpx.HTTPError, httpx.UnsupportedProtocol, ValueError, LookupError, TypeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
