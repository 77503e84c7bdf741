"""Which tapdeck this is."""

from importlib import metadata


def version() -> str:
    """The installed version; "checkout" when it runs from its sources without being installed."""
    try:
        return metadata.version("tapdeck")
    except metadata.PackageNotFoundError:
        return "checkout"
