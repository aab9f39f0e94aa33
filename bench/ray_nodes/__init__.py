"""A fleet's nodes on a real Ray cluster: what starts, what dies, and how soon it is back; see ``__main__``."""
