"""Where model files lie: version directories and the files in them."""
