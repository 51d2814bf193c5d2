"""Runs a backward pass: inspects the graph, gives turns, computes values."""
