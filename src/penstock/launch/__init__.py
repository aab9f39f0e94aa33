"""Processes: one supervisor that loads the weights and forks a gateway and the workers, and looks after all of them."""
