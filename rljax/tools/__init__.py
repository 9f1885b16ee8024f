"""Tools that a policy may call while it writes a response."""
