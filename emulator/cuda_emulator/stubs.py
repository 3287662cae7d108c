"""Write the sources of the libraries that torch's CUDA build links to and that this device does not have.

Each function answers the library's code for "not supported", and the call is counted. The few that must answer, so that
torch starts, are in ``ANSWERS``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

OURS = {"libcudart.so.13", "libcuda.so.1"}
UNVERSIONED = {
    "nccl": "libnccl.so.2",
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "nvshmem": "libnvshmem_host.so.3",
    "curand": "libcurand.so.10",
}
"""The library of a symbol that carries no version, by its first letters."""
_HANDLE = "*(void**)a = (void*)0x1000; return 0;"
ANSWERS = {
    "cublasCreate_v2": _HANDLE,
    "cublasLtCreate": _HANDLE,
    "cusparseCreate": _HANDLE,
    "cusolverDnCreate": _HANDLE,
    "cudnnCreate": _HANDLE,
    "cudnnGetVersion": "return 92000;",
    "cudnnGetCudartVersion": "return 13000;",
    "ncclGetVersion": "*(int*)a = 22907; return 0;",
    "nvrtcVersion": "*(int*)a = 13; *(int*)b = 0; return 0;",
    "cublasLtGetCudartVersion": "return 13000;",
    "cuptiGetResultString": '*(const char**)b = "not part of the emulated device"; return 0;',
}
NOT_SUPPORTED = {
    "libcublas.": 15,
    "libcublasLt.": 15,
    "libcudnn.": 3000,
    "libcufft.": 16,
    "libcusolver.": 9,
    "libcusparse.": 10,
    "libcusparseLt.": 10,
    "libcupti.": 27,
    "libnccl.": 5,
}
"""Each library's own code for "not supported". The others answer 1, which is an error in all of them."""
_TEXTS = re.compile(r"(GetErrorString|GetLastError$|GetStatusString|GetStatusName|GetErrorName)")


def needed_symbols(torch_libraries: Path) -> dict[str, set[tuple[str, str]]]:
    """Per library of NVIDIA: the names and versions of the symbols that torch's libraries ask for."""
    symbols: dict[str, set[tuple[str, str]]] = {}
    for library in sorted(torch_libraries.glob("lib*.so")):
        for soname in re.findall(r"\[(lib(?:cu|nv|nccl)[^\]]*\.so\.\d+)\]", _output("readelf", "-d", library)):
            symbols.setdefault(soname, set())
        for line in _output("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            home = _library_of(name, version.lstrip("@"))
            if home:
                symbols.setdefault(home, set()).add((name, version.lstrip("@")))
    return symbols


def write_source(soname: str, symbols: set[tuple[str, str]], folder: Path) -> tuple[Path, list[str]]:
    """The C file of one library, and the flags of the linker that it needs."""
    lines = ["typedef unsigned long long word;", "void cuda_emulator_count_call(const char*);"]
    refusal = next((code for prefix, code in NOT_SUPPORTED.items() if soname.startswith(prefix)), 1)
    lines += [_function(name, refusal) for name, _ in sorted(symbols)]
    source = folder / f"{soname}.c"
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    versions = sorted({version for _, version in symbols if version})
    if not versions:
        return source, []
    script = folder / f"{soname}.map"
    script.write_text(f"{versions[0]} {{ global: *; }};\n", encoding="utf-8")
    return source, [f"-Wl,--version-script={script}"]


def _function(name: str, refusal: int) -> str:
    if name in ANSWERS:
        code = ANSWERS[name]
    elif _TEXTS.search(name):
        code = 'return (word)"not part of the emulated device";'
    else:
        code = f'cuda_emulator_count_call("{name}"); return {refusal};'
    return f"word {name}(word a, word b, word c, word d) {{ {code} }}"


def _library_of(name: str, version: str) -> str | None:
    if version.startswith(("libcu", "libnv")):
        return version
    if version not in ("", "NVSHMEM"):
        return None
    return next((library for prefix, library in UNVERSIONED.items() if name.startswith(prefix)), None)


def _output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
