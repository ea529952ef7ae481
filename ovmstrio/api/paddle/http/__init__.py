"""``POST /{name}/{method}``: the HTTP way into Paddle Serving's pipelines."""

from ovmstrio.api.paddle.http.application import make_application, make_metrics_application

__all__ = ["make_application", "make_metrics_application"]
