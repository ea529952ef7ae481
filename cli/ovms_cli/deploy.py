"""``ovms deploy``: give a configuration to a cluster, by an engine that exists."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ovms_cli.console import fail, note
from ovms_cli.exits import EX_UNREACHABLE
from ovms_cli.problems import conclude

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["register"]

_IMPORT_PATH: Final = "ovmstrio.cluster.ray.application:application"


class Proxies(StrEnum):
    """Where Ray's proxies run."""

    EVERY_NODE = "EveryNode"
    HEAD_ONLY = "HeadOnly"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    engines = typer.Typer(no_args_is_help=True, help="Give a configuration to a cluster.")
    engines.command("ray")(ray)
    app.add_typer(engines, name="deploy")


def ray(
    config: Annotated[Path, typer.Argument(help="config.json, at this path on each machine", show_default=False)],
    *,
    address: Annotated[str, typer.Option(help="the cluster; auto is the one of this machine")] = "auto",
    name: Annotated[str, typer.Option(help="name of the application")] = "ovms",
    route_prefix: Annotated[str, typer.Option("--route_prefix", help="path before those of the server")] = "/",
    http_host: Annotated[str, typer.Option("--http_host", help="where Ray's proxies listen for HTTP")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option("--http_port", help="port of Ray's proxies for HTTP")] = 8000,
    grpc_port: Annotated[int, typer.Option("--grpc_port", help="port of Ray's proxies for gRPC")] = 9000,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="option of ovms serve for each replica, such as cache_dir=/cache", show_default=False),
    ] = None,
    ingress: Annotated[
        str,
        typer.Option(
            help='placement of the group with the doors, where there are several: {"replicas":2}', show_default=False
        ),
    ] = "{}",
    proxies: Annotated[Proxies, typer.Option(help="the machines that have doors")] = Proxies.EVERY_NODE,
    output: Annotated[
        Path | None,
        typer.Option(help="write the file for `serve run` and `serve deploy`, and deploy nothing", show_default=False),
    ] = None,
) -> None:
    """Deploy a configuration with Ray Serve, a deployment for each group of services: exits with 1 on an error.

    Addresses and ports are those of Ray's proxies, and count where Ray Serve does not run yet.  What runs already under
    the name is replaced, replica by replica.
    """
    from ovmstrio.core.errors import ConfigError

    args = {"config": str(config.absolute()), "settings": _settings(setting or ()), "ingress": _placement(ingress)}
    try:
        from ovmstrio.cluster.ray.application import GRPC_SERVICERS, PATHS, application

        args["settings"] = {
            key: str(Path(value).absolute()) if key in PATHS else value for key, value in args["settings"].items()
        }
        built = application(args)
    except ConfigError as error:
        conclude(error.problems, "")
    except ValueError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        _fail_without_ray(error)
    document = {
        "proxy_location": str(proxies),
        "http_options": {"host": http_host, "port": http_port},
        "grpc_options": {"port": grpc_port, "grpc_servicer_functions": GRPC_SERVICERS},
        "applications": [
            {"name": name, "route_prefix": route_prefix, "import_path": _IMPORT_PATH, "args": args},
        ],
    }
    if output is not None:
        _write(output, document)
        return
    _deploy(address, document, built)
    typer.echo(f"✓ deployed {name}: http://{http_host}:{http_port}{route_prefix}, gRPC at port {grpc_port}")


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
        fail(f"--ingress {text}: expected an object of JSON: {error}")


def _fail_without_ray(error: ModuleNotFoundError) -> None:
    from ovmstrio.core.extras import Extra, way_to_install

    if (error.name or "").partition(".")[0] not in {"ray", "starlette"}:
        raise error
    fail(f"{error.name} is not installed: {way_to_install(Extra.RAY)}")


def _write(output: Path, document: dict[str, Any]) -> None:
    import yaml

    try:
        output.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    except OSError as error:
        fail(f"{output} cannot be written: {error.strerror}")
    typer.echo(f"✓ generated {output}")
    note(f"deploy it with: serve deploy {output}", style="")


def _deploy(address: str, document: dict[str, Any], built: Any) -> None:
    """Give an application to a cluster, and wait until it runs."""
    from ray import init, serve

    try:
        init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        fail(f"there is no cluster at {address}: {error}; start one with: ray start --head", EX_UNREACHABLE)
    (app,) = document["applications"]
    serve.start(
        proxy_location=document["proxy_location"],
        http_options=document["http_options"],
        grpc_options=document["grpc_options"],
    )
    try:
        serve.run(built, name=app["name"], route_prefix=app["route_prefix"])
    except RuntimeError as error:
        told = serve.status().applications.get(app["name"])
        reasons = [] if told is None else [one.message for one in told.deployments.values() if one.message]
        fail("\n".join([str(error), *reasons]))
