"""What a decode loop decodes next, and what happens when a response pauses or ends."""
