"""The models of a handler's project: where they come from, which of them are here, and who uses them."""
