"""Model families, one readable file each: weights in, logits out.  No scheduling, no sampling, no files."""
