"""Constrained answers: schemas to try, and what must hold for each of them."""
