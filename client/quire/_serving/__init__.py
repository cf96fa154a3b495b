"""What the allocator's and the worker's servers have in common; not part of the public interface."""
