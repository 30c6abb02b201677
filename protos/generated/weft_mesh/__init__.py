"""Generated from protos/weft_mesh; run protos/compile.py."""
