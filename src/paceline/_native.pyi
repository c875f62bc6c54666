"""The native CPU engine, compiled from native/. Absent where the package was installed without a C++ compiler."""

def version() -> str:
    """Version of the package that this extension was built with."""

def read_bandwidth(num_threads: int, num_bytes: int) -> float:
    """GB/s that the threads together read from a buffer of num_bytes. Raises MemoryError."""
