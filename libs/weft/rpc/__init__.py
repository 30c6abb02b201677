"""gRPC servers, channels, status mapping, and conversion of values to messages."""

import os

# Waiting threads poll for messages themselves. gRPC's newer EventEngine (on in Python since 2026) polls in its own
# threads, which wake the waiting one. That takes a sixth to a quarter of a short request's time and a tenth of the
# gateway's CPU (docs/results/gateway.md). gRPC reads the variable at the first channel or server; a value from outside
# wins. Threads named `event_engine` exist without it too: they run timers and calls.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
