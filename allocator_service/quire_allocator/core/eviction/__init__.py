"""Eviction: the policies, the queue that they rank, and the model that the default policy learns."""
