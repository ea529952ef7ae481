"""Sample incrementer: the smallest packet graph, with three Python nodes."""
