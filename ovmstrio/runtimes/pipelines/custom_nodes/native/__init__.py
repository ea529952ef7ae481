"""Custom nodes that are shared libraries with the C interface of ``include/custom_node_interface.h``."""
