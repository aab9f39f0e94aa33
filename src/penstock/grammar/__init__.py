"""Constrained output: which tokens may come next, so that the whole answer is what was asked for.

``intake`` has a grammar checked beside its event loop, in a process that can be stopped (``checking``, ``checker``).
Its text then travels with the request (``types.Grammar``).  A worker compiles it once (``worker.Grammars``) and steps
one ``matcher.Matcher`` an answer.  The state of an answer follows from its tokens alone, so it never travels: who takes
an answer over reads its tokens again.
"""
