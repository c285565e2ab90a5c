"""What Tidemark is measured against. Each runs as a process of its own: `python -m tests.bench.competitors <name>`.

All of them are given an advantage: none writes its positions anywhere, none survives a crash exactly, and each knows
only what the workload holds (no zombies, no conflicts, no late completions).
"""
