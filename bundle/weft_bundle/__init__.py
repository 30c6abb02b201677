"""Distribution bundles: checkpoints compressed without loss. The format is described in docs/bundles.md."""
