"""Policies: decoder-only transformers as pure functions over a params pytree."""
