"""Text to tokens to vectors, without any download: the same text gives the same bits everywhere."""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moecomm.errors import ConfigError

VOCABULARY: Final = 1 << 20  # hash buckets, wide enough that a page of text has no collision
PIECE: Final = 6  # letters of one token at most: long words become several
MIX: Final = (1.0, 0.5, 0.25)  # how much of this token, the last and the one before are in a vector

_PIECES = re.compile(r"[^\W\d_]+|\d|\S")  # words, single digits, single other signs


def default_text() -> tuple[str, str]:
    """Name and text of the project's README: from the installed package, or from a checkout.

    Raises:
        ConfigError: neither is there.
    """
    checkout = Path(__file__).parents[2] / "README.md"
    if checkout.is_file():
        return "README.md", checkout.read_text(encoding="utf-8")
    try:
        text = metadata.metadata("moecomm")["Description"]
    except (metadata.PackageNotFoundError, KeyError):
        text = None
    if not text:
        raise ConfigError("text=None: no README comes with this installation; give a file")
    return "README of moecomm", str(text)


def load_text(path: Path | None) -> tuple[str, str]:
    """Name and contents of a text file; the project's README for ``None``.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, or has no visible character.
    """
    if path is None:
        return default_text()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"text={str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"text={str(path)!r}: must be UTF-8 text ({error.reason})") from error
    if not text.strip():
        raise ConfigError(f"text={str(path)!r}: must have at least one visible character")
    return path.name, text


def tokenise(text: str) -> list[str]:
    """Lower-case pieces of words of at most ``PIECE`` letters, digits and signs, in text order.

    A piece that continues a word starts with ``##``, so that "ring" and "scatte|ring" differ.
    """
    tokens: list[str] = []
    for match in _PIECES.finditer(text.lower()):
        word = match.group()
        pieces = [word[i : i + PIECE] for i in range(0, len(word), PIECE)]
        tokens += [pieces[0], *("##" + piece for piece in pieces[1:])]
    return tokens


def token_ids(tokens: list[str]) -> npt.NDArray[np.int64]:
    """[T] int64: each token's hash bucket, below ``VOCABULARY``."""
    buckets = {token: _bucket(token) for token in set(tokens)}
    return np.array([buckets[token] for token in tokens], dtype=np.int64)


def _bucket(token: str) -> int:
    digest = hashlib.blake2b(token.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def vectors(kind: int, number: int, shape: tuple[int, ...], seed: int) -> npt.NDArray[np.float32]:
    """Standard normal float32 of ``shape``; the same for the same three numbers on any machine.

    ``kind`` separates uses (embedding, router, experts), ``number`` is the token or the expert.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, (kind << 32) + number]))
    return generator.standard_normal(shape, dtype=np.float32)


EMBEDDING: Final = 1


def embed(
    ids: npt.NDArray[np.int64], start: int, stop: int, hidden: int, seed: int
) -> npt.NDArray[np.float32]:
    """[stop-start, hidden] float32 vectors of the tokens ``start`` to ``stop`` of ``ids``.

    A vector mixes its token with the two before it, so that a word is not always routed alike,
    and has a root mean square of 1, as behind a model's normalisation.
    """
    table = {int(i): vectors(EMBEDDING, int(i), (hidden,), seed) for i in np.unique(ids)}
    rows: npt.NDArray[np.float32] = np.zeros((stop - start, hidden), np.float32)
    for place in range(start, stop):
        for back, share in enumerate(MIX[: place + 1]):
            rows[place - start] += np.float32(share) * table[int(ids[place - back])]
    rms = np.sqrt(np.mean(np.square(rows), axis=1, keepdims=True, dtype=np.float64))
    normed: npt.NDArray[Any] = rows / rms
    return normed.astype(np.float32)
