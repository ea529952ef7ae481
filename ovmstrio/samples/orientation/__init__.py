"""Sample orientation: detects whether a page is upright or turned by 90, 180 or 270 degrees."""
