"""Package ``cortex_internal`` of Nucleus, as handlers import it."""
