"""GGUF files, read as a Hugging Face folder would be: tensors, ``config.json`` and tokenizer."""
