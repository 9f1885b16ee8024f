"""Plans a run before it starts: memory, compile time and speed, also for devices that are not there.

hardware.py    memory, bandwidth and arithmetic of devices, and the roofline that turns work into seconds
topologies.py  names such as v5e:2x4, and the devices to compile for
pool.py        pools that compile programs for shapes, or only note them: the largest of each kind is compiled
programs.py    the run's engine and trainer with shapes in the place of arrays, and what they compile
drafters.py    EAGLE heads and small models: what they hold, and their programs
memory.py      bytes a device of everything that a run holds, and the largest sum of them
passes.py      FLOPs and bytes of a pass, from sizes: what simulations count, too
roofline.py    FLOPs and bytes of a decode step, a verifying pass and an update
rollout.py     time of a rollout for a distribution of response lengths
planner.py     `make_plan`: all of the above from a config
table.py       the plan as text and as JSON
"""
