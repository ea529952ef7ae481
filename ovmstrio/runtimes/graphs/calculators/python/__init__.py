"""PythonExecutorCalculator: nodes that run user code.

::

    contract.py   what such a node must look like
    importing.py  the handler's file as a module of its own, apart from all others
    loading.py    from the node's options to its OvmsPythonModel
    handler.py    the loaded node: its object and its end
    instance.py   the node in one running graph
    calls.py      user code on threads and on the event loop
    outputs.py    what execute may give back
    failures.py   what the log and the client are told of errors in user code
"""

from ovmstrio.runtimes.graphs.calculators.python.executor_calculator import PYTHON_EXECUTOR

__all__ = ["PYTHON_EXECUTOR"]
