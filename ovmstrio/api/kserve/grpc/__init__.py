"""The gRPC front end: services of grpclib's shape on a trio transport."""
