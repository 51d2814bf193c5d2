"""The gradient itself, as a building block."""
