"""Package the notebooks and the data, which are top-level folders of the repository, as folders of `ddp_tutorial`.

pyproject.toml contains all other settings.
"""

from setuptools import find_namespace_packages, setup

FOLDERS = {"ddp_tutorial.notebooks": "notebooks", "ddp_tutorial.data": "data"}

setup(packages=[*find_namespace_packages(include=["ddp_tutorial*"]), *FOLDERS], package_dir=FOLDERS)
