"""Code that all servers share. This package is not part of the public interface."""
