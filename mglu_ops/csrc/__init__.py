"""The package into which an installation puts the folder `csrc`; pyproject.toml says so. Here it is empty."""
