"""``POST /{name}/{method}``: the HTTP way into Paddle Serving's pipelines."""

from ovmstrio.frontends.rest.ops.application import make_application, make_metrics_application

__all__ = ["make_application", "make_metrics_application"]
