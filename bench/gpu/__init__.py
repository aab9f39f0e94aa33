"""One GPU: are its kernels right, and how near are they to what the device can do?  See ``python -m bench.gpu -h``."""
