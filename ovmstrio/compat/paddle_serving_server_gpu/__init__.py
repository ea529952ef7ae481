"""Paddle Serving's server package of older GPU releases: the modules of ``paddle_serving_server``."""

import paddle_serving_server

paddle_serving_server.refuse_original(__name__)
__path__ = paddle_serving_server.__path__
__version__ = paddle_serving_server.__version__
