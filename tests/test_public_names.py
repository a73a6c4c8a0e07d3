"""What `import merope` gives, and what it does not load."""

import subprocess
import sys

import pytest

import merope


def test_every_public_name_is_there() -> None:
    assert all(getattr(merope, name) is not None for name in merope.__all__)
    assert len(set(merope.__all__)) == len(merope.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="cameraz"):
        merope.cameraz  # noqa: B018


def test_a_missing_library_is_named_with_the_extra_that_brings_it() -> None:
    script = "import sys; sys.modules['diffusers'] = None; import merope; merope.attach"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "merope.attach needs diffusers, which is not installed: pip install 'merope[wan]'" in done.stderr


def test_importing_merope_loads_no_heavy_library() -> None:
    heavy = ("diffusers", "transformers", "cv2", "pycolmap", "matplotlib", "av", "sklearn", "triton")
    script = f"import merope, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
