"""rsrv serves many compiled models on one GPU, behind Triton. Importing this package loads no other module."""

__version__: str


def __getattr__(name: str) -> str:
    """Look up `__version__` in the package's metadata, where it comes from pyproject.toml."""
    if name == "__version__":
        from importlib.metadata import version

        return version("rsrv")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
