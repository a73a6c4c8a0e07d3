"""A pytest plugin that takes work without an effect out of Triton's interpreter, which is most of its time.

test_interpreted_kernels.py loads it. It reaches into Triton: what has another name there fails at the import.
"""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
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


def keep_shapes() -> None:
    """Triton checks and writes out the shape of every result anew. There are few of them."""
    kept: dict[tuple[int, ...], tuple[tl.tuple, int, str, tl.constexpr, tl.tuple]] = {}
    of_scalar = tl.constexpr(1), tl.tuple([])
    check = tl.block_type.__init__

    def block(self: tl.block_type, element_ty: tl.dtype, shape: Iterable[int | tl.constexpr]) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if sizes not in kept:
            check(self, element_ty, list(sizes))
            shape_of_tensor = tl.tuple([tl.constexpr(size) for size in sizes])
            kept[sizes] = self.shape, self.numel, str(self.shape), tl.constexpr(self.numel), shape_of_tensor
        self.shape, self.numel, words, *self.of_tensor = kept[sizes]
        self.element_ty, self.name = element_ty, f"<{words}, {element_ty}>"

    def tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else of_scalar

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor


def broadcast_no_equal_shapes() -> None:
    """Most operands have one shape, which is one object with `keep_shapes`. Triton compares them size by size."""
    broadcast = TritonSemantic.broadcast_impl_value

    def quick(self: TritonSemantic, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        return (left, right) if left.shape is right.shape else broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = quick


replace_the_language_once()
check_no_sums_for_overflow()
keep_types_of_numbers()
keep_shapes()
broadcast_no_equal_shapes()
