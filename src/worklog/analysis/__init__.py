"""What the tables of a trace say: where a device's time went, and on which kernels. No thresholds, no advice."""
