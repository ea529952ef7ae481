"""Encodings of requests and responses: protobuf messages, JSON numbers, raw tensor contents, multipart and gzip."""
