"""``penstock serve --catalogue``: several models behind one address, each loaded when it is asked for."""
