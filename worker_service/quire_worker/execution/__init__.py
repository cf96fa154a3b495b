"""One batch on the device, what can fail there, and what is compiled before the first request."""
