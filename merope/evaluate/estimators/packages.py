"""Packages that estimators import when they are first needed."""

import importlib
import signal
import threading
from types import ModuleType

PACKAGES = {"colmap": "pycolmap", "opencv": "cv2"}
"""What an estimator imports when it is first called; it is tried when the estimator is made."""


def import_package(name: str) -> ModuleType:
    """A package, imported without a change to what SIGTERM does.

    pycolmap's own answer to it prints a stack trace and aborts, in processes that ignore the signal as well.
    """
    module = importlib.import_module(name)
    before = signal.getsignal(signal.SIGTERM)  # Python knows of no handler but its own
    if before is not None and threading.current_thread() is threading.main_thread():  # no other may set one
        signal.signal(signal.SIGTERM, before)
    return module
