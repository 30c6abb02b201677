"""Tests of the prefill worker."""
