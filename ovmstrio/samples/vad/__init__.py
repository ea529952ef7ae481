"""Sample vad: voice activity detection with a state that the client passes from call to call."""
