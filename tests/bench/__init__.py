"""The benchmark: `python -m tests.bench` measures Tidemark beside its alternatives and writes docs/benchmarks.md.

Everything runs on this machine, against servers started for it; each thing measured is a process of its own.
"""
