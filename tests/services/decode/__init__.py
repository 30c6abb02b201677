"""Tests of the decode worker."""
