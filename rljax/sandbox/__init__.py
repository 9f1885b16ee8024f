"""A sandbox for untrusted programs, such as code that a policy wrote.

limits.py       limits on the resources of a program
jail.py         the launcher: namespaces, a separate file system, limits (a script, run by process.py)
process.py      starts a program in a jail, and ends it with all its descendants
code_tests.py   tests of a program's functions or of its output, compared outside of the jail
code_runner.py  the script that runs these tests inside the jail
values.py       Python values as JSON, for both sides
"""
