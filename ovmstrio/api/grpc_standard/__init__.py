"""Services that every gRPC server has: health, reflection."""
