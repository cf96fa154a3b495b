"""Ranks: several processes that compute one model together.

This package identifies, starts and watches them, and carries their messages. `quire_worker.model.splitting` divides the
computation among them.
"""
