"""One server: its settings, its nursery tree, its life from start to drain."""
