"""Several processes that compute one model together: which of them this one is, how they are started and watched, and
what they say to each other. What each of them computes is said in `quire_worker.model.splitting`."""
