"""A fleet in a discrete-event simulation under the scheduler's own code, and the peers' formulas beside it."""
