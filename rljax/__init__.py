"""RL post-training of language models in JAX, with rollouts whose tokens no speed-up changes."""
