"""Real text as bytes: the standard library's own documentation by default, or the user's file.

`python launch/gpt/corpus.py FILE` writes the default corpus to a file, which ranks and runs can share.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

# A fixed list: a walk over all modules would also import the ones that open a window or a browser. The
# order is the corpus's order. A module that a Python release lacks is left out.
MODULES = """
    abc argparse ast asyncio asyncio.base_events asyncio.events asyncio.futures asyncio.locks
    asyncio.protocols asyncio.queues asyncio.runners asyncio.streams asyncio.subprocess asyncio.tasks
    asyncio.transports base64 bdb binascii bisect builtins bz2 cProfile calendar cmath cmd code codecs
    codeop collections collections.abc colorsys compileall concurrent.futures concurrent.futures.process
    concurrent.futures.thread configparser contextlib contextvars copy copyreg csv ctypes ctypes.util
    dataclasses datetime decimal difflib dis doctest email email.charset email.contentmanager
    email.encoders email.feedparser email.generator email.header email.headerregistry email.message
    email.mime.base email.mime.text email.parser email.policy email.utils enum errno faulthandler filecmp
    fileinput fnmatch fractions ftplib functools gc getopt getpass gettext glob graphlib gzip hashlib
    heapq hmac html html.entities html.parser http http.client http.cookiejar http.cookies http.server
    imaplib importlib importlib.abc importlib.machinery importlib.metadata importlib.resources
    importlib.util inspect io ipaddress itertools json json.decoder json.encoder keyword linecache locale
    logging logging.config logging.handlers lzma mailbox marshal math mimetypes mmap modulefinder
    multiprocessing multiprocessing.connection multiprocessing.context multiprocessing.managers
    multiprocessing.pool multiprocessing.queues multiprocessing.shared_memory multiprocessing.synchronize
    netrc numbers operator optparse os os.path pathlib pdb pickle pickletools pkgutil platform plistlib
    poplib pprint profile pstats py_compile pyclbr pydoc queue quopri random re reprlib runpy sched
    secrets select selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3 ssl stat
    statistics string stringprep struct subprocess symtable sys sysconfig tabnanny tarfile tempfile
    textwrap threading time timeit token tokenize tomllib trace traceback tracemalloc types typing
    unicodedata unittest unittest.async_case unittest.case unittest.loader unittest.main unittest.mock
    unittest.result unittest.runner unittest.suite urllib.error urllib.parse urllib.request
    urllib.robotparser uuid venv warnings wave weakref wsgiref.handlers wsgiref.headers
    wsgiref.simple_server wsgiref.util wsgiref.validate xml.dom xml.dom.minidom xml.dom.pulldom
    xml.etree.ElementTree xml.parsers.expat xml.sax xml.sax.handler xml.sax.saxutils xml.sax.xmlreader
    xmlrpc.client xmlrpc.server zipapp zipfile zipimport zlib zoneinfo
"""
SHORTEST_DOC = 80  # characters; shorter ones are mostly "Return repr(self)."


class Batch(NamedTuple):
    """Training pairs: int64 [batch, seq_len], targets are the inputs one byte later."""

    inputs: torch.Tensor
    targets: torch.Tensor


class Corpus:
    """A text as one uint8 tensor, with batches that depend on nothing but (seed, step)."""

    def __init__(self, text: bytes) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, step: int, *, batch: int, seq_len: int, seed: int) -> Batch:
        """Draw the global batch of a step: the same on every rank, whatever was drawn before.

        Args:
            step: optimizer step, >= 0.
            batch: sequences.
            seq_len: bytes per sequence.
            seed: seed of the run.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self) - seq_len, (batch, 1), generator=generator)
        window = self.data[starts + torch.arange(seq_len + 1)].long()
        return Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())

    def split(self, fraction: float, *, seq_len: int) -> tuple[Corpus, Corpus]:
        """Hold out a part at the end: what remains for training, and that part.

        Args:
            fraction: of the bytes to hold out.
            seq_len: bytes per sequence, to check that one and its last target fit into both.

        Raises:
            ValueError: one of them is too short.
        """
        size = len(self) - round(fraction * len(self))
        if not seq_len < size < len(self) - seq_len:
            raise ValueError(
                f"expected at least {seq_len + 1} bytes (--seq-len {seq_len} and the last target) to train on and to "
                f"hold out but got {size} and {len(self) - size}; take a longer text or another --eval-fraction"
            )
        return Corpus(bytes(self.data[:size])), Corpus(bytes(self.data[size:]))


def load_corpus(path: Path | None, *, seq_len: int) -> Corpus:
    """Read the training text.

    Args:
        path: any file, taken as bytes; None takes the standard library's documentation (about 2 s).
        seq_len: bytes per training sequence, to check that one fits.

    Raises:
        ValueError: the file cannot be read, or is shorter than one sequence and its last target.
    """
    try:
        text = standard_library_text().encode() if path is None else path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"expected a readable corpus file for --data but got {path} ({error.strerror}); "
            "name a text file, or leave --data out to take the standard library's documentation"
        ) from None
    if len(text) < seq_len + 1:
        raise ValueError(
            f"expected a corpus of at least {seq_len + 1} bytes (--seq-len {seq_len} and the last target) "
            f"but got {len(text)} bytes in {path}; take a longer file or a smaller --seq-len"
        )
    return Corpus(text)


def standard_library_text() -> str:
    """Docstrings of the standard library and the language reference of `help()`, about 1.7 MB.

    Equal in every process of one Python release, and different between releases: compare runs on one machine.
    """
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # deprecated modules say so on import
        texts = dict.fromkeys(_reference_topics())  # keeps the order and drops docstrings met twice
        for name in MODULES.split():
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            texts.update(dict.fromkeys(_docstrings(module)))
    return "\n\n".join(texts) + "\n"


def _reference_topics() -> Iterator[str]:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions ship Python without its documentation
        return
    for name in sorted(topics):
        yield topics[name].strip()


def _docstrings(module: ModuleType) -> Iterator[str]:
    """A module's docstring and those of its classes, functions and methods, in the order of their names."""
    values: list[object] = [module]
    for _, value in sorted(vars(module).items()):
        if inspect.isclass(value) or inspect.isroutine(value):
            values.append(value)
        if inspect.isclass(value):
            values += [member for _, member in sorted(vars(value).items(), key=lambda item: str(item[0]))]
    yield from filter(None, map(docstring, values))


def docstring(value: object) -> str | None:
    """An object's docstring without its indentation; None if it is short, or not the same in every process."""
    doc = getattr(value, "__doc__", None)
    # Generated docstrings can hold an object's address.
    if not isinstance(doc, str) or len(doc) < SHORTEST_DOC or " at 0x" in doc:
        return None
    return inspect.cleandoc(doc)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} FILE")
    Path(sys.argv[1]).write_bytes(standard_library_text().encode())
