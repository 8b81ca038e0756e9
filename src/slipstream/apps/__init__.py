"""Applications of the engine: networks, generated data, and a model of how training scales."""
