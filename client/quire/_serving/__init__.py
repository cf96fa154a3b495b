"""Code that all servers share. It is not part of the public interface."""
