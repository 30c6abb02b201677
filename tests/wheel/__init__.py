"""Tests of the wheel that `hatchling` builds of this checkout."""
