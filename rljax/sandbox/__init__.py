"""Programs that nobody has read, such as code that a policy wrote, run where they can do no harm.

limits.py       what such a program may use
jail.py         the launcher: namespaces, a file system of its own, limits (a script, run by process.py)
process.py      starts a program in a jail, and ends it with all that it started
code_tests.py   tests of a program's functions or of its output, judged outside of the jail
code_runner.py  what runs inside for that (a script)
values.py       Python values as JSON, for both sides
"""
