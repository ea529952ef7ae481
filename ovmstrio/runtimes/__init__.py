"""The kinds of services, a folder each."""
