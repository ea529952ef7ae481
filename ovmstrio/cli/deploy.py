"""``ovms deploy``: deploy a configuration to a cluster, such as Ray Serve."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from ovmstrio.cli.commands import App
from ovmstrio.cli.console import echo, fail, print_message
from ovmstrio.cli.exits import EX_UNREACHABLE
from ovmstrio.cli.problems import conclude

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import Event

_IMPORT_PATH: Final = "ovmstrio.cluster.ray.application:application"
_NO_CLUSTER: Final = "no cluster at {}: {}; start one with: ray start --head"
_KEPT: Final = (
    "Ray Serve was already running, and its proxies keep the addresses that they were started with; {} do not both "
    "answer from this machine. `serve shutdown` ends everything that Ray Serve runs; the next deployment then starts "
    "new proxies"
)
_HERE: Final = frozenset({"127.0.0.1", "localhost", "::1", "[::1]"})
_REACH_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 2.0


class Proxies(StrEnum):
    """Nodes that run Ray's proxies."""

    EVERY_NODE = "EveryNode"
    HEAD_ONLY = "HeadOnly"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    engines = App(help="Deploy a configuration to a cluster.")
    engines.command("ray")(ray)
    app.add_typer(engines, name="deploy")


def ray(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="File config.json; must exist at this path on each machine.")
    ],
    *,
    address: Annotated[
        str,
        typer.Option(
            "--address", metavar="ADDRESS", help="Address of the cluster; auto is the cluster of this machine."
        ),
    ] = "auto",
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the application.")] = "ovms",
    route_prefix: Annotated[
        str, typer.Option("--route-prefix", metavar="PATH", help="Prefix of all paths of the server.")
    ] = "/",
    http_host: Annotated[
        str, typer.Option("--http-host", metavar="HOST", help="HTTP bind address of Ray's proxies.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--http-port", metavar="PORT", help="HTTP port of Ray's proxies.")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc-port", metavar="PORT", help="gRPC port of Ray's proxies.")] = 9000,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--setting",
            metavar="NAME=VALUE",
            help="Option of ovms serve for each replica, such as cache_dir=/cache. Repeatable.",
        ),
    ] = None,
    ingress: Annotated[
        str,
        typer.Option(
            "--ingress",
            metavar="JSON",
            help='Placement of the ingress group, if there are several groups: {"replicas":2}.',
            show_default=False,
        ),
    ] = "{}",
    proxies: Annotated[
        Proxies, typer.Option("--proxies", metavar="|".join(Proxies), help="Nodes that run Ray's proxies.")
    ] = Proxies.EVERY_NODE,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the file for `serve run` and `serve deploy` instead of deploying.",
        ),
    ] = None,
) -> None:
    """Deploy a configuration with Ray Serve, with one deployment per group of services. Exit code 1 on errors.

    Addresses and ports are those of Ray's proxies, and have an effect only if Ray Serve is not running yet. An
    application of the same name is replaced, replica by replica.
    """
    args = {"config": str(config.absolute()), "settings": _settings(setting or ()), "ingress": _placement(ingress)}
    built, servicers = _built(args)
    document = {
        "proxy_location": str(proxies),
        "http_options": {"host": http_host, "port": http_port},
        "grpc_options": {"port": grpc_port, "grpc_servicer_functions": servicers},
        "applications": [
            {"name": name, "route_prefix": route_prefix, "import_path": _IMPORT_PATH, "args": args},
        ],
    }
    if output is not None:
        _write(output, document)
        return
    ran_before = _deploy(address, document, built)
    if ran_before and not (_answers(http_host, http_port) and _answers(http_host, grpc_port)):
        echo(f"✓ deployed {name}")
        print_message(_KEPT.format(f"{http_host}:{http_port} and {grpc_port}"), style="yellow")
        return
    echo(f"✓ deployed {name}: http://{http_host}:{http_port}{route_prefix}, gRPC at port {grpc_port}")


def _settings(given: Sequence[str]) -> dict[str, Any]:
    wrong = next((each for each in given if "=" not in each), None)
    if wrong is not None:
        fail(f"--setting {wrong}: expected NAME=VALUE")
    return {key.strip().lstrip("-"): value for key, _, value in (each.partition("=") for each in given)}


def _placement(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError as error:
        fail(f"--ingress {text}: expected a JSON object: {error}")


def _built(args: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the application and the gRPC servicers of Ray's proxies; paths in ``args`` become absolute."""
    from ovmstrio.core.errors import ConfigError

    try:
        from ovmstrio.cluster.ray.application import GRPC_SERVICERS, PATHS, application

        args["settings"] = {
            key: str(Path(value).absolute()) if key in PATHS else value for key, value in args["settings"].items()
        }
        return application(args), GRPC_SERVICERS
    except ConfigError as error:
        conclude(error.problems, "")
    except ValueError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        _fail_without_ray(error)


def _fail_without_ray(error: ModuleNotFoundError) -> NoReturn:
    from ovmstrio.util.extras import Extra, install_command

    if (error.name or "").partition(".")[0] not in {"ray", "starlette"}:
        raise error
    fail(f"{error.name} is not installed: {install_command(Extra.RAY)}")


def _write(output: Path, document: dict[str, Any]) -> None:
    import yaml

    try:
        output.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror}")
    echo(f"✓ generated {output}")
    print_message(f"deploy it with: serve deploy {output}", style="")


def _deploy(address: str, document: dict[str, Any], built: Any) -> bool:
    """Deploy an application, wait until it runs, and return whether Ray Serve was already running."""
    import threading

    from ray import init, serve

    _check_reachable(address)
    try:
        init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        fail(_NO_CLUSTER.format(address, error), EX_UNREACHABLE)
    (app,) = document["applications"]
    ran_before = bool(serve.status().proxies)
    if not ran_before:
        _start_proxies(document)
    over = threading.Event()
    waiting = threading.Thread(target=_report_progress, args=(app["name"], over), daemon=True)
    waiting.start()
    try:
        serve.run(built, name=app["name"], route_prefix=app["route_prefix"])
    except RuntimeError as error:
        application = serve.status().applications.get(app["name"])
        deployments = () if application is None else application.deployments.values()
        reasons = [each.message for each in deployments if each.message]
        fail("\n".join(_own_errors(reasons) or [str(error), *reasons]))
    finally:
        over.set()
        waiting.join(_LOOK_SECONDS)
    return ran_before


def _check_reachable(address: str) -> None:
    """Exit if nothing listens at an address; Ray itself needs minutes to find out."""
    import socket

    from ray.util import get_node_ip_address

    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    # Ray replaces a loopback address by the machine's external address.
    hosts = [host.strip("[]"), *([get_node_ip_address()] if host in _HERE else [])]
    reasons = []
    for each in hosts:
        try:
            socket.create_connection((each, int(port)), _REACH_SECONDS).close()
        except OSError as error:
            reasons.append(str(error))
        else:
            return
    fail(_NO_CLUSTER.format(address, reasons[0]), EX_UNREACHABLE)


def _start_proxies(document: dict[str, Any]) -> None:
    from ray import serve
    from ray.exceptions import RayError

    try:
        serve.start(
            proxy_location=document["proxy_location"],
            http_options=document["http_options"],
            grpc_options=document["grpc_options"],
        )
    except (RayError, RuntimeError, TimeoutError) as error:
        # Otherwise the rest of Ray Serve keeps these ports for the next deployment.
        serve.shutdown()
        fail(f"Ray's proxies cannot be started: {str(error).strip().rpartition(chr(10))[2]}")


def _report_progress(name: str, over: Event) -> None:
    """Print Ray's messages about deployments that do not run yet, such as about missing resources."""
    from ray import serve
    from ray.exceptions import RayError

    shown: set[str] = set()
    while not over.wait(_LOOK_SECONDS):
        try:
            application = serve.status().applications.get(name)
        except (RayError, RuntimeError):
            return
        messages = [] if application is None else [each.message for each in application.deployments.values()]
        for message in messages:
            if message and message not in shown and not over.is_set():
                print_message(message.partition("\n")[0])
                shown.add(message)


def _own_errors(reasons: Sequence[str]) -> list[str]:
    """Return the messages of the server's own errors in Ray's tracebacks."""
    lines = (line.partition(": ") for reason in reasons for line in reason.splitlines())
    return list(dict.fromkeys(text for kind, _, text in lines if kind.startswith("ovmstrio.core.errors.")))


def _answers(host: str, port: int) -> bool:
    import socket

    try:
        socket.create_connection(("127.0.0.1" if host in {"0.0.0.0", "::"} else host, port), _REACH_SECONDS).close()  # noqa: S104 - compared
    except OSError:
        return False
    return True
