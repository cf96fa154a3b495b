"""RPC handlers of WorkerService: they check a call before the engine gets it, and build its answer."""
