"""A model server for OpenVINO whose every request is a trio nursery."""
