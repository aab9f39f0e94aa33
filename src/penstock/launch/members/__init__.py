"""Which workers on other hosts a gateway may use: a fixed list, a file that is watched, or what DNS, NATS or Ray
answers."""
