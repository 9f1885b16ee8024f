"""Rollout workers in processes of their own; not a bit of a run changes. See docs/cluster.md.

coordinator.py   which worker decodes what: a pure state machine. Read this one first
rollouts.py      the rollouts in progress, and which one a worker works on
router.py        who decodes what of one
routing.py       makes the router of a run; what papers add comes in here
idle_work.py     the same for what workers do that have nothing to decode
messages.py      events, commands and orders
ledger.py        every token that was sampled; the same one twice must be the same bits
decoder.py       the driver's side: what the collector calls instead of a `Scheduler`
starting.py      the workers that a config asks for, as a context
blueprint.py     what a worker is built from, and building it
worker.py        a worker's side, around the decode loop
weights/         versions of the weights, by three channels; used only if their digest is the published one
publisher.py     publishes them in the background, and knows whom a channel has failed
timeline.py      what everyone did when, for reports
desired_workers.py  the number of workers as a file, while a run goes on
fabric.py        what carries messages; a local one for tests
ray_fabric.py    the fabric on Ray, and the only import of it
"""
