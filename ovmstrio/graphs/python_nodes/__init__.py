"""Python nodes of graphs: ``OvmsPythonModel`` classes in the event loop, in threads and in worker processes."""
