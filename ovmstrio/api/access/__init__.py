"""What the operations of each protocol need of who asks for them."""
