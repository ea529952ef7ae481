"""Package ``cortex_internal`` of Nucleus, as handlers import it; ``ovmstrio.handlers.cortex`` implements it."""
