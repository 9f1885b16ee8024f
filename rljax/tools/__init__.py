"""What a policy may call while it writes a response."""
