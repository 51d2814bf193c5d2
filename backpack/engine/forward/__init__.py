"""Watches a forward pass: operations, and calls of modules."""
