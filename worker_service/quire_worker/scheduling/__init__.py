"""Chooses the tokens that go through the model next, and the requests to the allocator. Pure: no device, no network."""
