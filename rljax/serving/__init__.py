"""Serves a trained policy: one thread decodes requests as they arrive, behind an OpenAI-compatible server."""
