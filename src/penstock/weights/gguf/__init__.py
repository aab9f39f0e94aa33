"""GGUF files (llama.cpp's): headers, tensors and metadata in the form of a Hugging Face folder."""
