"""Ways to choose among workers, one file each; ``port.py`` says what they are given and what they answer."""
