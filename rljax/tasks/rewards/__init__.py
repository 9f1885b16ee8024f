"""Rewards by name, combined with weights: `task.rewards` of a config.

registry.py    the names, where each runs, and what its arguments may be
extraction.py  where a response has its answer
text.py        exact, numeric, length: cheap, computed in the training process
checkers.py    format, math, functions of yours, reasoning-gym: computed in workers, which can be killed
worker.py      such a worker
pool.py        the workers of a run
combined.py    a task with rewards of its own choosing
"""
