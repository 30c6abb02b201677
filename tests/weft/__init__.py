"""Tests of the library, file for file."""
