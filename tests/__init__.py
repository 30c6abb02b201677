"""Tests of Weft, from single functions to whole meshes."""
