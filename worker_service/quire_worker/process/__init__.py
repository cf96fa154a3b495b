"""The worker as one process or several: its command line, its first checks, its start and its end."""
