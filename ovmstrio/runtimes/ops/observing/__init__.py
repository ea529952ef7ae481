"""What a pipeline tells of itself: log files, tracer, timelines, metrics and the live view."""
