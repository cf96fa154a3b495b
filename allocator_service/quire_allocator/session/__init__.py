"""The allocator's side of the session protocol: the machine of a stream, its shell over gRPC, unary sessions."""
