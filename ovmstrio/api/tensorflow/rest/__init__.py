"""TensorFlow Serving's REST API as OpenVINO Model Server has it: predict, model status and model metadata."""
