"""Plans a run before it starts: memory, compile time and speed, also for devices that are not there.

hardware.py      memory, bandwidth and arithmetic of devices, with their sources
topologies.py    names such as v5e:2x4, and the devices to compile for
programs.py      the run's engine and trainer with shapes in the place of arrays; compiles what they compile
heads.py         EAGLE heads: what they hold, and their programs
small_models.py  small models that draft: what they hold, and their programs
recording.py     of all programs of a drafter, compiles the largest of each kind
depth.py         compiles a deep policy at two small depths and extrapolates
memory.py        bytes a device of everything that a run holds, and the largest sum of them
roofline.py      time of a decode step, a verifying pass and an update from FLOPs and bytes
rollout.py       time of a rollout for a distribution of response lengths
planner.py       `make_plan`: all of the above from a config
table.py         the plan as text and as JSON
"""
