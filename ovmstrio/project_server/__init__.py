"""The server of one handler project, in one process or in many.

::

    serve_project ── one process: models, handler, front end
                  └─ many: the parent accepts connections and gives each to the worker process with the fewest

    settings.py     what the command line says
    environment.py  what a process is made to look like before the handler is imported
    logs.py         JSON lines on standard output
    readiness.py    the file that says that the project can be called
    front_ends.py   models, handler and front end, one on the other
    serving.py      the server's life, from start to drain
    passing.py      connections from process to process
    workers.py      the parent of many worker processes
    worker.py       one of them
"""
