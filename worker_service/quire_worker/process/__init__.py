"""The worker as a process, or several: its command line, what it looks at first, and how it starts and ends."""
