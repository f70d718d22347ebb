"""Write empty libraries in place of CUDA's, so that CUDA builds of torchvision and torchaudio load with a CPU build of torch.

The CPU kernels of torchvision and torchaudio never call the missing functions. Some functions are called while the packages are
loaded, to register other kernels, but their results are ignored. Run the script with the Python of the environment that gets the
libraries. It needs pyelftools and ziglang, and does nothing if the environment has a CUDA build of torch.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from elftools.elf.elffile import ELFFile

#: Libraries of CUDA builds that a CPU build of torch lacks.
CUDA = ("libcudart.so.13", "libc10_cuda.so", "libtorch_cuda.so")


def main(folder: Path) -> None:
    """Write the libraries into `folder`, which must be in LD_LIBRARY_PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    torch = [file for file in (_home("torch") / "lib").glob("*.so*") if file.is_file()]
    if any(file.name == "libtorch_cuda.so" for file in torch):
        return
    defined = set().union(*(_symbols(file, defined=True) for file in torch))
    lacked: dict[str, str] = {}
    for package in ("torchvision", "torchaudio"):
        for file in _home(package).rglob("*.so"):
            if any(name in CUDA for name in _needed(file)):
                lacked |= _symbols(file, defined=False)
    missing = {name: version for name, version in lacked.items() if name not in defined}
    for library in CUDA:
        # Put functions without a version into libtorch_cuda.so. The loader would find them in any of the libraries.
        names = sorted(
            name for name, version in missing.items() if (version or "libtorch_cuda.so") == library
        )
        _build(folder / library, names)
    print(f"{folder}: {len(CUDA)} libraries with {len(missing)} functions")


def _home(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed for {sys.executable}")
    return Path(spec.origin).parent


def _needed(file: Path) -> list[str]:
    with file.open("rb") as opened:
        dynamic = ELFFile(opened).get_section_by_name(".dynamic")
        return [tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"]


def _symbols(file: Path, *, defined: bool) -> dict[str, str]:
    """Return the dynamic symbols that a library defines or lacks, each with its version or an empty text."""
    with file.open("rb") as opened:
        elf = ELFFile(opened)
        table, versions = (elf.get_section_by_name(name) for name in (".dynsym", ".gnu.version"))
        needs = elf.get_section_by_name(".gnu.version_r")
        names: dict[int, str] = {}
        if needs is not None:
            for _, entries in needs.iter_versions():
                names |= {entry.entry.vna_other: entry.name for entry in entries}
        symbols = {}
        for index, symbol in enumerate(table.iter_symbols()):
            weak = symbol.entry.st_info.bind == "STB_WEAK"
            if symbol.name and (symbol.entry.st_shndx != "SHN_UNDEF") == defined and (defined or not weak):
                number = versions.get_symbol(index).entry.ndx if versions is not None else 0
                symbols[symbol.name] = names.get(number, "") if isinstance(number, int) else ""
        return symbols


def _build(library: Path, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder, "stub.c"), Path(folder, "versions")
        source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in names))
        versions.write_text(f"{library.name} {{ }};\n")
        command = [
            sys.executable,
            "-m",
            "ziglang",
            "cc",
            "-shared",
            "-fPIC",
            "-w",
            str(source),
            "-o",
            str(library),
        ]
        options = [f"-Wl,-soname,{library.name}", f"-Wl,--version-script={versions}"]
        subprocess.run(command + options, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
