"""What calls of WorkerService pass before the engine hears of them, and what they are answered."""
