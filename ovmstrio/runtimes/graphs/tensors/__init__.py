"""How values of each stream type are read from a request."""
