"""From a plan to drawn tokens: whatever stands behind ``port.Runner``."""
