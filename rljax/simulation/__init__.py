"""A cluster on a virtual clock: the coordinator and the routers of runs, and workers of which only times are
computed. See docs/simulation.md.

cluster.py     the fabric: workers, trainer, and the rollouts of steps in their order. Read this one first
worker.py      a worker: finish times in closed form between two events
costs.py       seconds of passes, from a model's shape and a device, or from measured passes
drafting.py    how far is drafted at which batch, and what it brings
ledger.py      the ledger, which counts tokens instead of keeping them
scenario.py    a simulation as keys and values, and the responses of its steps
outcome.py     what a simulation tells: table, JSON, and a timeline picture
figures.py     the papers' figures by simulation, from the inputs and scenarios in scenarios/*.yaml
"""
