"""One engine for every role: it counts how many tokens of a request are computed and how many should be."""
