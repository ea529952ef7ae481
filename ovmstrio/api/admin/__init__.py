"""What operators ask: the state of the configuration, its reload, metrics."""
