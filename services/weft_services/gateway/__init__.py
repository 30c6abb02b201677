"""The edge of the mesh: OpenAI REST and public gRPC in, token ids out to the workers, text back to clients."""
