"""Ways to choose among workers, one file each."""
