"""Messages between processes: values as bytes, memory that both ends see, errors.

Nothing here needs more than the standard library and numpy, nor a Python newer than 3.10: a worker process may run
under an interpreter that has nothing else of the server's.
"""
