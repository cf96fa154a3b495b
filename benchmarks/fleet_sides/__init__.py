"""Parts of `fleet.py`: workloads, simulated workers on a virtual clock, and the rules that choose a worker."""
