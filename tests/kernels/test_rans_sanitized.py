"""The entropy coder under the compiler's sanitizers: a bundle may come from anywhere, and what decodes it is C++. Takes
half a minute, most of it to compile."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.device import ISAS
from weft_bundle import rans
from weft_kernels.native import build

ROUNDS = 400
SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SOURCES = [Path(__file__).with_name("rans_trial.cpp"), *sorted(Path(rans.__file__).parent.glob("*.cpp"))]
SECONDS = 240


def compiled(isa: str, folder: Path) -> Path:
    """The trial and the coder, for one instruction set."""
    compiler = build._compiler()
    if compiler is None or not build._takes(compiler, SANITIZED):
        pytest.skip("no compiler with sanitizers here")
    flags = (*build.COMMON, *build.FLAGS[isa], *SANITIZED, f"-I{build.ROOT}")
    objects = {str(source): f"{folder}/{source.stem}.o" for source in SOURCES}
    commands = [[compiler, *flags, "-c", "-o", target, source] for source, target in objects.items()]
    with ThreadPoolExecutor(2) as threads:
        for wrong in threads.map(build._run, commands):
            assert not wrong
    # a program that may lie anywhere may lie where the sanitizer wants to
    assert not build._run([compiler, "-no-pie", *SANITIZED, "-o", f"{folder}/trial", *objects.values()])
    return folder / "trial"


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("isa", [isa for isa in ("avx2", "avx512") if isa in ISAS])
def test_no_chunk_makes_the_coder_read_or_write_where_it_should_not(isa: str, tmp_path: Path) -> None:
    """Chunks that are right come back; of others both ways to decode say the same."""
    # what is left is of no matter, and looking for it needs rights that a container may not have
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [str(compiled(isa, tmp_path)), str(ROUNDS)]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, f"{ROUNDS} rounds\n"), done.stdout + done.stderr
