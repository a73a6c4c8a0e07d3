"""A disk that is full before a file is whole."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def room_for(count: int) -> Iterator[None]:
    """Files take so many bytes; what goes beyond them is an OSError, after the part that fits."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
