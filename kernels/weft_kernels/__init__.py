"""Compute kernels: for every op its meaning in plain torch and, where there is one, a Triton kernel."""
