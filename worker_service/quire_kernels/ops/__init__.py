"""One kernel a file, with its launcher and its reference."""
