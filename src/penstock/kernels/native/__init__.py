"""The C++ backend: one kernel family of this processor, on NumPy arrays."""
