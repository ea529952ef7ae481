"""The matrix: performance of models of five sizes, relative to OpenVINO alone in the same minute.

::

    cells ─┬─> a server for each model, settings and neighbours ─> load over each interface ───┬─> run (JSON)
           └─> a process with the same model in OpenVINO alone ─> its best rate, just before ──┘
    run ─> table, chart; two runs ─> differences
"""
