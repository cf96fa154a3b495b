"""Code that the allocator's and the worker's servers share. It is not part of the public interface."""
