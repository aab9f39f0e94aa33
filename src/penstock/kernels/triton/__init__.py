"""The Triton backend: the hot operations as GPU kernels, everything else as the oracle has it on the same device."""
