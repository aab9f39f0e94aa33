"""What processes say to each other: typed messages, the transport under them, the ports they speak through."""
