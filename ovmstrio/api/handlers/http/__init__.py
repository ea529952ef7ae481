"""Handlers over HTTP: alone at ``/``, or under their names beside models and graphs.

::

    cors.py         what pages of other origins may do
    service.py      one handler: request -> arguments -> method -> answer
    access_log.py   a line for each answer
    lane.py         plain requests, by the fast lane
    application.py  all others, by the framework
    mounts.py       the handlers of a server that serves models as well
    serving.py      the front end of a project alone
"""
