"""Handlers over HTTP.

::

    handler_routes.py      one handler: request -> arguments -> method -> answer
    handler_refusals.py    answers for requests that do not reach it
    held_stream.py         streams that hold a request until they are closed
    handler_cors.py        what pages of other origins may do
    handler_access_log.py  a line for each answer
"""
