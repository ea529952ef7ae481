"""ImageNet classifier of pictures of any size."""
