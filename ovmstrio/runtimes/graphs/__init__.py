"""Packet graphs: timestamps, input policies, calculators, and the instances that serve calls and streams.

::

    config/             graph.pbtxt -> GraphConfig, with every problem at its line
    input_streams.py    queue and timestamp bound of one input stream
    policies/           when a node may run, and on which packets
    calculators/        what nodes do
    graph_instance.py   one run of a graph: a nursery, in which nodes run as tasks
    graph_servable.py   GraphServable: unary calls and streams
"""
