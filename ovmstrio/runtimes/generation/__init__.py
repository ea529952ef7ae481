"""Models that make text, and other things of texts: services whose engines are in processes of their own."""
