"""The index of reusable prefixes: blocks of one page's tokens, chained to the block before them.

A block is found by the digest of its whole prefix and accepted only if its parent is the very block found before and
its tokens are equal, so two prefixes are never taken for each other, whatever the hash does.
"""

from __future__ import annotations

from hashlib import blake2b


class Block:
    """The tokens of one full page, and the page that holds them in each group (0: none)."""

    __slots__ = ("digest", "indexed", "links", "pages", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: bytes, parent: Block | None, groups: int, indexed: bool) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent
        self.pages = [0] * groups
        #: Pages bound, child blocks, and sequences that count the block as theirs. At 0 it leaves the index.
        self.links = 0
        self.indexed = indexed


def digest_of(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=32).digest()


class PrefixIndex:
    """Digest -> block. Owns the links between blocks; pages are bound and unbound by the pools."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def blocks(self) -> list[Block]:
        return list(self._blocks.values())

    def root(self, salt: str) -> Block:
        """The parent of a salt's first blocks."""
        name = salt.encode()
        return self._obtain(digest_of(b"", name), name, None)

    def find(self, parent: Block, tokens: bytes) -> Block | None:
        block = self._blocks.get(digest_of(parent.digest, tokens))
        if block is None or block.parent is not parent or block.tokens != tokens:
            return None
        return block

    def obtain(self, parent: Block, tokens: bytes) -> Block:
        """The block, made if it does not exist. It stays out of the index when its parent is out of it, or when its
        digest belongs to other tokens."""
        return self._obtain(digest_of(parent.digest, tokens), tokens, parent)

    def _obtain(self, digest: bytes, tokens: bytes, parent: Block | None) -> Block:
        block = self._blocks.get(digest)
        if block is not None and block.parent is parent and block.tokens == tokens:
            return block
        indexed = block is None and (parent is None or parent.indexed)
        made = Block(digest, tokens, parent, self._groups, indexed)
        if indexed:
            self._blocks[digest] = made
            if parent is not None:
                parent.links += 1
        return made

    def unlink(self, block: Block | None) -> None:
        """Take one link away; a block without links leaves, and with it its link to its parent."""
        while block is not None and block.indexed:
            block.links -= 1
            if block.links:
                return
            del self._blocks[block.digest]
            block.indexed = False
            block = block.parent

    def clear(self) -> None:
        """Forget everything. The pools must have unbound their pages before."""
        for block in self._blocks.values():
            block.indexed = False
        self._blocks.clear()
