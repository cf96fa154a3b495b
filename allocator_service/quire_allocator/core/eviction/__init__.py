"""Which cached blocks leave first: the policies, the queue that they rank, and what the default one learns."""
