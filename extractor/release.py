"""Which tapdeck this is."""


def version() -> str:
    """The installed version; "checkout" when it runs from its sources without being installed."""
    # Late: the console starts without it, and every millisecond of its start is seen.
    from importlib import metadata

    try:
        return metadata.version("tapdeck")
    except metadata.PackageNotFoundError:
        return "checkout"
