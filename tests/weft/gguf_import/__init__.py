"""Tests of `weft convert`."""
