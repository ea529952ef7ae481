"""The matrix: what users see of models of five sizes, as ratios to what OpenVINO alone does in the same minute.

::

    cells ─┬─> a server for each model, settings and surroundings ─> load over each door ──────┬─> run (JSON)
           └─> a process that runs the same model by OpenVINO alone ─> its best, just before ──┘
    run ─> table, chart; two runs ─> what differs
"""
