"""The custom nodes that come with the server; they are OVMS's, of the same names, parameters and results."""
