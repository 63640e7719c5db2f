"""Git bundles written without git: the same bytes whatever versions of git and zlib are installed.

Objects are stored whole and uncompressed, which git reads like any other pack.
"""

import hashlib
import struct
import zlib
from typing import Dict

COMMIT, TREE, BLOB = 1, 2, 3
KINDS = {COMMIT: "commit", TREE: "tree", BLOB: "blob"}
# The first second of 2025, UTC: git objects hold their dates.
SIGNATURE = "lego <lego@example.invalid> 1735689600 +0000"


class Bundle:
    """Commits without parents, one a reference."""

    def __init__(self):
        self.objects = {}
        self.references = {}

    def commit(self, reference: str, files: Dict[str, str], message: str) -> str:
        """Adds a commit of these files (path to text) and returns its hash."""
        tree = self.tree({path.encode(): text.encode() for path, text in files.items()})
        lines = [f"tree {tree}", f"author {SIGNATURE}", f"committer {SIGNATURE}", "", message, ""]
        commit = self.add(COMMIT, "\n".join(lines).encode())
        self.references[reference] = commit
        return commit

    def tree(self, files: Dict[bytes, bytes]) -> str:
        entries, folders = [], {}
        for path, content in files.items():
            name, slash, rest = path.partition(b"/")
            if slash:
                folders.setdefault(name, {})[rest] = content
            else:
                entries.append((name, b"100644", self.add(BLOB, content)))
        for name, inner in folders.items():
            entries.append((name, b"40000", self.tree(inner)))
        # Git sorts folders as if their names ended in a slash.
        entries.sort(key=lambda entry: entry[0] + (b"/" if entry[1] == b"40000" else b""))
        return self.add(TREE, b"".join(mode + b" " + name + b"\0" + bytes.fromhex(id) for name, mode, id in entries))

    def add(self, kind: int, content: bytes) -> str:
        id = hashlib.sha1(f"{KINDS[kind]} {len(content)}\0".encode() + content).hexdigest()
        self.objects.setdefault(id, (kind, content))
        return id

    def write(self, path: str):
        with open(path, "wb") as file:
            file.write(b"# v2 git bundle\n")
            for reference, commit in sorted(self.references.items()):
                file.write(f"{commit} {reference}\n".encode())
            file.write(b"\n" + self.pack())

    def pack(self) -> bytes:
        parts = [b"PACK" + struct.pack(">II", 2, len(self.objects))]
        for kind, content in self.objects.values():
            parts += [entry_header(kind, len(content)), stored(content)]
        pack = b"".join(parts)
        return pack + hashlib.sha1(pack).digest()


def entry_header(kind: int, size: int) -> bytes:
    """Kind and size of a pack entry: 4 bits of the size, then 7 a byte, least significant first."""
    first, size = kind << 4 | size & 15, size >> 4
    header = []
    while size:
        header.append(first | 128)
        first, size = size & 127, size >> 7
    return bytes(header + [first])


def stored(content: bytes) -> bytes:
    """A zlib stream of stored blocks (RFC 1950 and 1951)."""
    blocks = [content[start : start + 65535] for start in range(0, len(content), 65535)] or [b""]
    stream = [b"\x78\x01"]
    for number, block in enumerate(blocks, 1):
        stream.append(struct.pack("<BHH", number == len(blocks), len(block), len(block) ^ 0xFFFF) + block)
    return b"".join(stream) + struct.pack(">I", zlib.adler32(content))
