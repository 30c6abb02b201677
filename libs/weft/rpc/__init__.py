"""gRPC made small: servers, channels, statuses, and domain values on the wire."""

import os

# Who waits for messages polls for them itself. gRPC's newer engine (EventEngine, on in Python since 2026) has threads
# of its own do that, which hand over to the one that waits: it takes a sixth to a quarter of a short request's time and
# a tenth of the gateway's CPU (docs/results/gateway.md). Read at the first channel or server; a value
# from outside has the last word. Without it there still are threads called `event_engine`: they run timers and calls.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
