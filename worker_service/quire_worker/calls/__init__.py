"""RPC handlers of WorkerService: they check a call, hand it to the engine, and build its answer."""
