"""Ways to choose among workers, one file each; ``base.py`` says what they are given and what they return."""
