"""A chat over gRPC, word by word, against a mesh on this machine: `.venv/bin/python examples/grpc_chat.py`."""

import sys

import grpc

from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub

question = sys.argv[1] if len(sys.argv) > 1 else "Who are you?"
with grpc.insecure_channel("127.0.0.1:9000") as channel:
    request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=question)])
    for piece in InferenceServiceStub(channel).Chat(request, timeout=60):
        print(piece.content, end="", flush=True)
print(f"\n{piece.usage.prompt_tokens} tokens in, {piece.usage.completion_tokens} out")
