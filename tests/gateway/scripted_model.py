"""A worker with a scripted model: the conversation says what the model answers. Everything else is a real worker's.

The user's last message ends with a JSON array: the texts of the model's first, second and later turns after this
message. A tiny model would never write a tool call by itself. Template, tokens and gateway are real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc

from tests.client.servers import ScriptedServer, scripted_server

FORWARDED: Final = ("GetStatus", "GetServerInfo", "ListAdapters", "ListRequests", "Tokenize", "Detokenize")
USER: Final = "<|im_start|>user\n"
ASSISTANT: Final = "<|im_start|>assistant\n"
END: Final = "<|im_end|>"


def turn(prompt: str) -> str:
    """Returns the model's next text in a conversation that Qwen's template rendered."""
    _, _, after = prompt.rpartition(USER)
    asked, _, later = after.partition(END)
    said = json.loads(asked[asked.index("[") :])
    text: str = said[later.count(ASSISTANT) - 1]
    return text


@contextmanager
def scripted_model(worker_address: str) -> Iterator[ScriptedServer]:
    """Serves in front of a worker of the family `qwen3`. That worker renders and tokenizes conversations."""
    with grpc.insecure_channel(worker_address) as channel, scripted_server() as server:
        worker = worker_pb2_grpc.WorkerServiceStub(channel)

        def answer(request: Any, _context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
            prompt = list(request.tokens.ids)
            told = worker.Detokenize(pb.DetokenizeRequest(token_ids=prompt)).texts
            tokens = list(worker.Tokenize(pb.TokenizeRequest(text=turn(b"".join(told).decode()))).token_ids)
            texts = worker.Detokenize(pb.DetokenizeRequest(token_ids=tokens)).texts
            for token, text in zip(tokens, texts, strict=True):
                yield pb.GenerateResponse(token_ids=[token], text=text.decode())
            usage = pb.Usage(prompt_token_count=len(prompt), output_token_count=len(tokens))
            yield pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, usage=usage)

        for name in FORWARDED:
            method = getattr(worker, name)
            server.answers[name] = lambda request, _context, method=method: method(request)
        server.answers["Generate"] = answer
        yield server
