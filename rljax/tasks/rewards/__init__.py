"""Rewards by name, combined with weights: `task.rewards` of a config.

registry.py    the rewards by name, where they run, and their arguments
extraction.py  finds the answer in a response
spelling.py    one spelling of the numbers in it
text.py        exact, numeric, length: cheap, computed in the training process
checkers.py    format, math, functions of yours, reasoning-gym: computed in workers, which can be killed
endpoints.py   judge, reward_model: computed by a server
failures.py    what a reward raises
worker.py      the process that runs checkers
pool.py        the workers of a run
combined.py    a task scored by the rewards of a config
"""
