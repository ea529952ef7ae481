"""MediaPipe-style graphs: configuration, packet scheduling and the servable."""
