"""What Tidemark is measured against. Each runs as a process of its own: those in Python as
`python -m tests.bench.competitors <name>`, those on the JVM (`jvm`) from what tests/bench/java holds.

All of them are given an advantage: none writes its positions anywhere, none survives a crash exactly, none keeps
evidence, and of what the workload never sends (zombies, conflicts, late completions) they know little.
"""
