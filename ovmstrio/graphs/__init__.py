"""MediaPipe-style graphs: configuration, packet scheduling, the servable and its requests."""
