"""Speculative decoding: guess the next tokens cheaply, compute them all in one step, keep those that are right.

Law 1 holds by construction.  A guess stands only if the model draws that very token at that position, with that
position's own random numbers, so what is kept is what would have been drawn one by one.
"""
