"""Is a page upright, or turned by 90, 180 or 270 degrees."""
