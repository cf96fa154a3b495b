"""Between the clients and gRPC: channels, retries, streams, and messages turned into values."""
