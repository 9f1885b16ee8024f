"""Serves a trained policy: one thread decodes requests as they arrive, in an OpenAI-compatible server."""
