"""Execution of batches on the device, its failures, and the compilation before the first request."""
