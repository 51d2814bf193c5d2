"""Modules that stand for an operation, and the converter that puts them in."""
