"""The allocator's side of the session protocol: its state machine, its stream over gRPC, and who owns what."""
