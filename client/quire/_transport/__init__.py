"""Connects the clients to gRPC: channels, retries, streams, and conversion between messages and values."""
