"""A pytest plugin that takes work without an effect out of Triton's interpreter, which is more than half of its time.

test_interpreted_kernels.py loads it. It reaches into Triton: what has another name there fails at the import.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def replace_the_language_once() -> None:
    """Triton does it anew at every call of a function. Nothing in this process wants the language of the compiler."""
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


def check_no_sums_for_overflow() -> None:
    """Triton works out whether each sum of integers fits, and forgets the answer where it is not debugged."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def keep_types_of_numbers() -> None:
    """Triton writes its table of NumPy's types anew at every look into it."""
    look_up, kept = interpreter._get_np_dtype, {}

    def quick(of: tl.dtype) -> np.dtype:
        name = of.scalar.name
        if name not in kept:
            kept[name] = look_up(of)
        return kept[name]

    interpreter._get_np_dtype = quick


replace_the_language_once()
check_no_sums_for_overflow()
keep_types_of_numbers()
