"""Sample image_classifier: an ImageNet classifier for pictures of any size."""
