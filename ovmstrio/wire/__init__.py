"""The ways bytes come and go, free of any protocol of inference."""
