"""The native CPU engine, compiled from native/. Absent where the package was installed without a C++ compiler."""

def version() -> str:
    """Version of the package that this extension was built with."""
