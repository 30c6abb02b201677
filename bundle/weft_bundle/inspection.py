"""Compares the stored size of each tensor of a bundle with the entropy of its weights, as a table and as SVG."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from weft.weights.formats import BUNDLE_SUFFIX, PIECE_BYTES
from weft_bundle import rans
from weft_bundle.convert import Report, weight_files
from weft_bundle.format import PackedTensor
from weft_bundle.unpack import BundleFile

BAR_WIDTH, ROW_HEIGHT, LABEL_WIDTH, VALUE_WIDTH = 520, 18, 420, 150


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A tensor of the table.

    entropy: share of its bytes that its 16-bit patterns need if drawn independently; None for other dtypes.
    """

    file: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    original_bytes: int
    stored_bytes: int
    entropy: float | None

    @property
    def label(self) -> str:
        """Name on one line, with unprintable characters escaped."""
        return _printable(self.name)

    @property
    def share(self) -> float:
        return self.stored_bytes / max(1, self.original_bytes)


def _printable(name: str) -> str:
    return name if name.isprintable() else repr(name)


def tensor_rows(directory: Path, report: Report) -> Iterator[TensorRow]:
    """Read every 16-bit tensor. Raises BadCheckpoint."""
    for path in weight_files(directory, BUNDLE_SUFFIX):
        with closing(BundleFile.open(path)) as bundle:
            for tensor in bundle.header.tensors:
                entropy = None
                if tensor.dtype in ("BF16", "F16") and tensor.original_bytes:
                    entropy = _entropy(bundle, tensor, partial(report, path.name))
                else:
                    report(path.name, tensor.original_bytes)
                yield TensorRow(
                    str(path.relative_to(directory)), tensor.name, tensor.dtype, tensor.shape, tensor.codec,
                    tensor.original_bytes, tensor.size_bytes, entropy,
                )  # fmt: skip


def _entropy(bundle: BundleFile, tensor: PackedTensor, report: Callable[[int], object]) -> float:
    """Count piece by piece: a tensor may be larger than memory."""
    counts, memory = np.zeros(1 << 16, np.int64), np.empty(min(PIECE_BYTES, tensor.original_bytes), np.uint8)
    for first in range(0, tensor.original_bytes, PIECE_BYTES):
        piece = memory[: tensor.original_bytes - first]
        bundle.read_into(tensor.name, first, piece)
        counts += np.bincount(piece.view(np.uint16), minlength=len(counts))
        report(len(piece))
    return rans.entropy_of(counts) / 16


def total_entropy(rows: Sequence[TensorRow]) -> float:
    """Return the entropy share of all tensors; a tensor without entropy counts with its stored size."""
    needed = sum(row.stored_bytes if row.entropy is None else row.entropy * row.original_bytes for row in rows)
    return needed / max(1, sum(row.original_bytes for row in rows))


def svg_chart(title: str, rows: list[TensorRow]) -> str:
    """Return an SVG with one bar per tensor: stored share filled, entropy as a mark."""
    height = ROW_HEIGHT * (len(rows) + 3)
    width = LABEL_WIDTH + BAR_WIDTH + VALUE_WIDTH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        "<style>text{fill:#222}.all{fill:#e4e7ec}.kept{fill:#3f6fb5}.bound{stroke:#d1495b;stroke-width:2}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}.all{fill:#333a45}}</style>",
        f'<text x="8" y="16" font-size="14">{html.escape(_printable(title))}</text>',
        '<text x="8" y="32">filled: stored, of BF16 = 1; red: entropy of the weights</text>',
    ]
    for number, row in enumerate(rows):
        top = ROW_HEIGHT * (number + 2.5)
        bound = "" if row.entropy is None else _mark(row.entropy, top)
        value = f"{100 * row.share:.2f} %" + ("" if row.entropy is None else f" ({100 * row.entropy:.2f} %)")
        parts.append(
            f'<text x="{LABEL_WIDTH - 6}" y="{top + 11}" text-anchor="end">{html.escape(row.label)}</text>'
            f'<rect class="all" x="{LABEL_WIDTH}" y="{top}" width="{BAR_WIDTH}" height="13"/>'
            f'<rect class="kept" x="{LABEL_WIDTH}" y="{top}" width="{BAR_WIDTH * min(1, row.share):.1f}" height="13"/>'
            f'{bound}<text x="{LABEL_WIDTH + BAR_WIDTH + 6}" y="{top + 11}">{value}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _mark(share: float, top: float) -> str:
    x = LABEL_WIDTH + BAR_WIDTH * share
    return f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 1}" y2="{top + 14}"/>'
