"""Protocol adapters: gRPC and REST requests as calls of the data plane."""
