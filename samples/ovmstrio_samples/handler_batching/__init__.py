"""A handler whose requests are gathered: one call answers many clients."""
