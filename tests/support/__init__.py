"""What several tests need: models made by code, real servers in subprocesses."""
