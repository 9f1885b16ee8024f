"""The console command `rljax`: a module a subcommand, and the table of them in `console.py`.

Every module has `main(argv, prog)`, which returns the exit status. The scripts of the same names run it too.
Nothing heavy is imported before the command line is checked.
"""
