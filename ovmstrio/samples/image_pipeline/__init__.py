"""Sample image_pipeline: Python nodes before and after an OpenVINO model."""
