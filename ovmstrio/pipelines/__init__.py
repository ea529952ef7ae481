"""DAG pipelines: structure, custom nodes, demultiplexing, gathering and the servable."""
