"""The benchmark: `python -m tests.bench` compares Tidemark with alternatives, for docs/explanation/benchmarks.md.

Everything runs on this machine, against servers started for it; each thing measured is a process of its own.
"""
