"""A conformance test of the Open Inference Protocol, version 2, for any server that implements it.

::

    python -m ovmstrio.conformance http://localhost:8000 --grpc localhost:9000 --model my_model
"""
