"""Request bodies to checked requests: one module per group of fields, and the same fields as JSON schemas."""
