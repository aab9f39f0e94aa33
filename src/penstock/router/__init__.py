"""From a valid request to tokens: which workers compute it, and what happens when one of them does not."""
