"""The packages of a wheel: those of `lightning_memopt`, and examples/, because `memopt demo` runs one of them."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lightning_memopt", "lightning_memopt.*"]), "lightning_memopt.examples"],
    package_dir={"lightning_memopt.examples": "examples"},
)
