"""Tables of the Arrow project, Feather and Parquet, in which data sets of driving keep poses. Needs pyarrow: [tables].

Whole numbers stay whole: stamps in nanoseconds never pass through a float.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merope.errors import invalid
from merope.formats.files import CUT_OFF, head_of
from merope.formats.writing import replacing

FEATHER, PARQUET = b"ARROW1", b"PAR1"
MAGIC = (FEATHER, PARQUET)
MOST_ROWS = 1 << 20

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Table:
    """Columns of a file as lists of Python's numbers, texts and lists."""

    path: Path
    columns: Columns

    def floats(self, name: str) -> Tensor:  # [T] float64
        """Numbers, none of them missing."""
        return torch.tensor([float(value) for value in self._all(name, (int, float), "numbers")], dtype=torch.float64)

    def whole(self, name: str) -> list[int]:
        """Whole numbers to the last digit."""
        return self._all(name, (int,), "whole numbers")

    def matrices(self, name: str) -> Tensor:  # [T, 4, 4] float64
        """4×4 matrices, which tables keep as 16 numbers, row by row."""
        for value in self.columns[name]:
            if not (isinstance(value, list) and len(value) == 16 and all(isinstance(x, float) for x in value)):
                raise invalid(f"{self.path} {name}", "16 numbers per row", repr(value)[:60], CUT_OFF)
        return torch.tensor(self.columns[name], dtype=torch.float64).unflatten(-1, (4, 4))

    def _all(self, name: str, kinds: tuple[type, ...], expected: str) -> list[Any]:
        for value in self.columns[name]:
            if not isinstance(value, kinds):
                raise invalid(f"{self.path} {name}", expected, repr(value)[:60], CUT_OFF)
        return self.columns[name]


def _arrow() -> Any:
    """pyarrow, which is large and seldom needed."""
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        message = "Feather and Parquet tables need pyarrow, which is not installed: pip install 'merope[tables]'"
        raise ModuleNotFoundError(message, name=error.name) from None
    return pyarrow


def column_names(path: Path) -> frozenset[str]:
    """What the columns of a table are called; its rows are not read."""
    with _opened(path) as (reader, schema):
        del reader
        return frozenset(schema.names)


def read_table(path: Path, names: Sequence[str]) -> Table:
    """These columns of a table. Others are not read."""
    with _opened(path) as (reader, schema):
        missing = [name for name in names if schema.names.count(name) != 1]
        if missing:
            expected = f"a table with the columns {', '.join(names)}"
            raise invalid(str(path), expected, f"one without {', '.join(missing)}", "name a table of this data set")
        table = reader(list(names))
        table.validate(full=True)
        if table.num_rows > MOST_ROWS:
            raise invalid(str(path), f"at most {MOST_ROWS:,} rows", f"{table.num_rows:,}", "cut the log into parts")
        columns = {name: table.column(name).to_pylist() for name in names}
    if not table.num_rows:
        raise invalid(str(path), "a table with rows", "an empty one", "export the poses again")
    return Table(path, columns)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:  # reads columns by name, schema
    """A table of either kind. Whatever a damaged one sets off is a ValueError that names the file."""
    head = head_of(path)
    if not head.startswith(MAGIC):
        raise invalid(str(path), "a Feather or Parquet table", f"a file that begins with {head[:6]!r}", CUT_OFF)
    arrow = _arrow()
    from pyarrow import ipc, parquet

    try:
        with arrow.OSFile(str(path)) as source:
            if head.startswith(PARQUET):
                file = parquet.ParquetFile(source, pre_buffer=False)
                yield lambda names: file.read(names, use_threads=False), file.schema_arrow
            else:
                schema = ipc.open_file(source).schema
                yield lambda names: _feather(source, schema, names), schema
    except (arrow.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        kind = "Parquet" if head.startswith(PARQUET) else "Feather"
        said = f"{type(error).__name__}: {str(error)[:120]}"
        raise invalid(str(path), f"a whole {kind} table", said, CUT_OFF) from None


def _feather(source: Any, schema: Any, names: Sequence[str]) -> Any:
    from pyarrow import ipc

    chosen = [schema.get_field_index(name) for name in names]
    return ipc.open_file(source, options=ipc.IpcReadOptions(included_fields=chosen, use_threads=False)).read_all()


def image_side(place: str, value: float) -> int:
    """Width or height of an image."""
    if not (math.isfinite(value) and value >= 1 and value == int(value)):
        raise invalid(place, "a number of pixels", value, CUT_OFF)
    return int(value)


def write_feather(file: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """A Feather table of version 2, compressed by LZ4 as pandas writes it."""
    arrow = _arrow()
    from pyarrow import ipc

    table = arrow.table(dict(columns))
    options = ipc.IpcWriteOptions(compression="lz4")
    with replacing(file) as part, ipc.new_file(str(part), table.schema, options=options) as out:
        out.write_table(table)


def write_parquet(file: Path, columns: Mapping[str, Sequence[Any]], types: Mapping[str, str]) -> None:
    """A Parquet table. types: those of columns that are not what their values suggest."""
    arrow = _arrow()
    from pyarrow import parquet

    kinds = {name: arrow.list_(arrow.float64(), 16) if of == "matrix" else of for name, of in types.items()}
    arrays = {name: arrow.array(values, type=kinds.get(name)) for name, values in columns.items()}
    with replacing(file) as part:
        parquet.write_table(arrow.table(arrays), str(part))
