"""Entry point for tools that still call ``setup.py``; all settings: pyproject.toml."""

from setuptools import setup

setup()
