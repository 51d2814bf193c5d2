"""The autograd graph: questions to it, and what operations and calls leave there."""
