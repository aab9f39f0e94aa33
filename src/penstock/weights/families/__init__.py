"""Model families: each reads its ``config.json`` into ``weights.architecture`` and names its tensors."""
