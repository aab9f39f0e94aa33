"""Runners: from a plan to sampled tokens (``interface.Runner``)."""
