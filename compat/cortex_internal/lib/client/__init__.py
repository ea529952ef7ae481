"""The clients that handlers' constructors get; the server has their implementations."""
