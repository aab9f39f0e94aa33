"""Text to token ids and back: the tokenizer, the vocabulary files it is read from, and the bytes of each token."""
