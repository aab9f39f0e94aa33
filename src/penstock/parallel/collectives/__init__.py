"""How the ranks of a group exchange arrays.  They are moved, never added: sums are ours (``kernels.ops.Ops.join``)."""
