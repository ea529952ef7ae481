"""Custom nodes that are Python files, with the same contract as libraries in C.

::

    def initialize(params): ...                   optional; what it gives is the manager
    def get_inputs_info(params[, manager]): ...   {name: (element type, shape)}
    def get_outputs_info(params[, manager]): ...  the same
    def execute(inputs, params[, manager]): ...   {name: array} of inputs to {name: array} of outputs
    def deinitialize(manager): ...                optional

Each may be ``async def``.  Plain functions run in worker threads, several calls at once.
"""
