"""Sample vad_stateful: voice activity detection with a stateful model and sequences."""
