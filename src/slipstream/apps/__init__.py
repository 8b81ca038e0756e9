"""Applications of the engine: networks, synthetic data, and a performance model of distributed training."""
