"""The engine: sees a model's operations, follows its samples, runs backward passes."""
