"""No camera encoding: U is the identity, attention is plain."""

from dataclasses import dataclass

from merope.attention.plan import Block
from merope.encodings.protocol import Encoding
from merope.encodings.tokens import Tokens


@dataclass(frozen=True)
class NoEncoding(Encoding):
    """The paper's "No camera PE" row."""

    def blocks(self, query: Tokens, key: Tokens) -> tuple[Block, ...]:
        """No block: every channel is left alone."""
        return ()
