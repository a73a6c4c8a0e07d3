"""What a file or folder holds, as far as formats are told apart by it."""

from pathlib import Path

from merope.formats.files import SAMPLE_LINES, Sample, archive_shapes, head_of, load_array, load_json, read_text
from merope.formats.tables import MAGIC, column_names


def take_sample(path: Path) -> Sample:
    """Look into a file or folder."""
    if path.is_dir():
        return Sample(files=frozenset(child.name for child in path.iterdir()))
    head = head_of(path)
    if head.startswith(b"\x93NUMPY"):
        return Sample(array_shape=load_array(path).shape)
    if head.startswith(b"PK\x03\x04"):
        return Sample(archive=archive_shapes(path))
    if head.startswith(MAGIC):
        return Sample(columns=column_names(path))
    text = read_text(path)
    if text.lstrip()[:1] in ("{", "["):
        return Sample(document=load_json(path))
    lines = (line.strip() for line in text.splitlines())
    return Sample(lines=tuple(line for line in lines if line)[:SAMPLE_LINES])
