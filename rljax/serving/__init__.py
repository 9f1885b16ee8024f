"""Using a trained policy: one thread that decodes whatever comes, and an OpenAI-compatible server over it."""
