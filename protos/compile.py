"""Compile protos/weft_mesh into protos/generated, or with --check say whether that is up to date."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).parent
GENERATED = PROTOS / "generated"


def compile_into(target: Path) -> None:
    """Write python, pyi, grpc and grpc pyi files of every proto below protos/weft_mesh."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "weft_mesh").rglob("*.proto"))
    # protoc finds the mypy plugins on PATH, and they are installed beside this interpreter
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    outs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *outs, *sources]
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    for package in (target / "weft_mesh", target / "weft_mesh" / "v1"):
        (package / "py.typed").touch()
        (package / "__init__.py").write_text('"""Generated from protos/weft_mesh; run protos/compile.py."""\n')


def stale_files(fresh: Path) -> list[str]:
    """Names of generated files that differ from, or are missing beside, a fresh compilation."""
    names = sorted({str(p.relative_to(root)) for root in (fresh, GENERATED) for p in root.rglob("*.py*")})
    names = [name for name in names if "__pycache__" not in name]
    same, _, _ = filecmp.cmpfiles(fresh, GENERATED, names, shallow=False)
    return sorted(set(names) - set(same))


def main() -> None:
    """Compile, or check and exit 1 with the stale files named."""
    if "--check" not in sys.argv[1:]:
        GENERATED.mkdir(exist_ok=True)
        compile_into(GENERATED)
        return
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        if stale := stale_files(Path(folder)):
            sys.exit(f"stale generated code, run `make protos`: {', '.join(stale)}")


if __name__ == "__main__":
    main()
