"""OVMS's example custom nodes, built in."""
