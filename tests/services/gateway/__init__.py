"""The gateway against fakes of its peers, over real gRPC and real HTTP."""
