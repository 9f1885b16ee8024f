"""Rollout workers in processes of their own; not a bit of a run changes. See docs/cluster.md.

coordinator.py   which worker decodes what: a pure state machine. Read this one first
messages.py      events, commands and orders
rollouts.py      the rollouts under way
router.py        who decodes what; pipe.py, migration.py, racing.py, planner.py plan, and ranked_queues.py,
                 moving_routers.py carry it out; routing.py makes the router of a run
ledger.py        every token that was sampled; the same one twice must be the same bits
decoder.py       the driver's side: what the collector calls instead of a `Scheduler`
worker.py        a worker's side, around the decode loop
weights/         versions of the weights, published once and checked by digest; publisher.py
facts.py         what driver and workers must have in common
fabric.py        what carries messages; a local one for tests
ray_fabric.py    the fabric on Ray, and the only import of it
"""
