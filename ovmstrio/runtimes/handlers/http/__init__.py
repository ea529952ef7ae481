"""What HTTP requests are to handlers, and what handlers' results are to HTTP; no front end is known here.

::

    values.py     headers, query parameters and forms, as handlers see them
    uploads.py    files of a form
    payload.py    the body by its content type
    arguments.py  what a handler's method asked for
    responses.py  Response and HTTPError, for handlers that want a status or headers of their own
    starlette.py  the same of Starlette, where that is installed
    results.py    what a method returned, as an answer
    errors.py     what it raised, as an answer
"""
