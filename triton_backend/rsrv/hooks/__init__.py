"""What hooks need again and again: `image`, `labels`, `boxes` and `text` (docs/hook-library.md).

Importing a module of it loads numpy and nothing else. Pillow and tokenizers are loaded by the functions that need them.
"""


class BadInput(ValueError):
    """The request is at fault. Raised by a hook or a `run`, it ends that request: INVALID_ARG, with this text."""


def needs(package: str) -> ImportError:
    """To be raised where `package` is not installed."""
    return ImportError(
        f"{package} is not installed where the hooks run, with tritonserver's Python: pip install 'rsrv[hooks]'"
    )
