"""Python nodes of graphs: ``OvmsPythonModel`` classes on the event loop, in threads and in worker processes."""
