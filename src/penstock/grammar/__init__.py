"""Structured output: which tokens may come next, so that the whole output follows a grammar.

A gateway checks a grammar in a process that can be killed (``checker_client``, ``checker_process``).  Its text then
travels with the request (``types.Grammar``).  A worker compiles it once (``manager.GrammarManager``) and advances one
``matcher.GrammarMatcher`` per request.  A matcher's state follows from the tokens alone, so it is never transferred:
after a migration the new worker replays the tokens.
"""
