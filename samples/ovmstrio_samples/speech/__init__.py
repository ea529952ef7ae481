"""Speech to text: English, thirty seconds at a time."""
