"""Rollout workers in processes of their own; not a bit of a run changes. See docs/cluster.md.

coordinator.py   which worker decodes what: a pure state machine. Read this one first
messages.py      events, commands and orders
ledger.py        every token that was sampled; the same one twice must be the same bits
decoder.py       the driver's side: what the collector calls instead of a `Scheduler`
blueprint.py     what a worker is built from, and building it
worker.py        a worker's side, around the decode loop
weights.py       versions of the weights, published once and checked by digest
timeline.py      what everyone did when, for reports
wish.py          how many workers are wished for while a run goes on
facts.py         what driver and workers must have in common
fabric.py        what carries messages; a local one for tests
ray_fabric.py    the fabric on Ray, and the only import of it
"""
