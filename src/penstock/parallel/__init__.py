"""How a model is laid over several devices."""
