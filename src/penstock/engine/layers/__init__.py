"""Building blocks of models.  They call ``kernels.ops`` on opaque arrays and never ask where they run."""
