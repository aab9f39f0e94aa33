"""Penstock beside its peers on one CPU: the same weights, prompts and threads, in alternating rounds.

``python -m bench.peers --help`` is the way in; docs/benchmarks.md has the figures and says what each of them means.
"""
