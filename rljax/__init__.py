"""RL post-training of language models in JAX, with rollouts whose tokens no speed-up changes."""

from rljax.host_memory import keep_freed_memory

keep_freed_memory()
