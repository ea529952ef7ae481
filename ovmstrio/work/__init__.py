"""Where work runs: placement, threads, processes, batches, and the code of users in them."""
