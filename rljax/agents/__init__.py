"""Training from an OpenAI-compatible endpoint: agents talk to the run, and their episodes train it."""
