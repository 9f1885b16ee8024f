"""The parts of `bench_peers.py`: a job that every library is given, and a program for each of them."""
