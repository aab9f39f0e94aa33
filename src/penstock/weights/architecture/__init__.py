"""What a model is, as data: its layers, its position encoding, and which tensors its weights are made of."""
