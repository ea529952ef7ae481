"""The only package that imports OpenVINO: read, shape, compile and run models."""
