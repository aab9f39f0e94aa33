"""A model over several devices: sizes, plans, each rank's part of the weights, and how ranks exchange arrays."""
