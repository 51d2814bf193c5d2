"""Entry point for tools that still call ``setup.py``; settings are in pyproject.toml.

Where an index shows the README, links need an address, which ``DOCS_REPOSITORY`` names.
"""

import os
import re
from pathlib import Path

from setuptools import setup

readme = Path("README.md").read_text(encoding="utf-8")
repository = os.environ.get("DOCS_REPOSITORY")
if repository:
    branch = os.environ.get("DOCS_BRANCH", "main")
    for start, folder in ((r"!\[[^]]*\]\(", "raw"), (r"\]\(", "blob")):
        absolute = rf"\1{repository}/{folder}/{branch}/"
        readme = re.sub(rf"({start})(?!\w+:|#)", absolute, readme)

setup(long_description=readme, long_description_content_type="text/markdown")
