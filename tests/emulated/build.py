"""Build the libraries of an emulated CUDA device for the torch of this environment.

Usage: python -m tests.emulated.build [FOLDER]      (default: .emulated/lib). Prints the folder.

What torch's libraries import is read from them (`objdump`, `nm`); each library of CUDA is built with the same name, symbols
and versions. A function is written by hand (cuda/*.cpp), or it is on the list of those that may do nothing, with a reason
(`NOTHING`); every other one returns an error, and names itself on stderr.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
CUDA = HERE / "cuda"
FOLDER = Path(".emulated") / "lib"
OF_CUDA = re.compile(r"(libcu|libnv|libnccl)")
RUNTIME = ["devices.cpp", "memory.cpp", "streams.cpp", "copies.cpp", "races.cpp", "graphs.cpp", "kernels.cpp"]
SOURCES = {"libcudart": RUNTIME, "libcuda": ["driver.cpp"], "libnvidia-ml": ["nvml.cpp"]}
"""By the library: what is written by hand; else libraries.cpp."""
OPERATORS = "operators.cpp"
UNVERSIONED = {
    "cuFile": "libcufile",
    "cusparseLt": "libcusparseLt",
    "nccl": "libnccl",
    "curand": "libcurand",
    "nvrtc": "libnvrtc",
    "nvshmem": "libnvshmem_host",
    "cu": "libcuda",
}
"""By the prefix of a symbol that is imported without a version, the library that it is in; the first one that fits."""
ERRORS = {"libcublas": 15, "libcublasLt": 15, "libcudnn": 3000, "libcusparse": 10, "libnccl": 3}
"""By the library, its status "not supported"; CUDA's own (801) for the others."""
NOTHING = {
    r"__cuda(Register|Unregister)FatBinary(End)?": "kernels are known by their names alone",
    r"cudaFuncSetAttribute|cudaKernelSetAttributeForDevice": "kernels compute nothing, with any attribute",
    r"cuLogs(Register|Unregister)Callback": "the device logs nothing",
    r"cudaProfiler(Start|Stop)": "nothing is profiled",
    r"cuTensorMapEncode\w+": "describes memory to a kernel, which computes nothing",
    r"cublas(Lt)?(Create|Destroy)(_v2)?|cublasLt\w+(Create|Destroy|Init(_internal)?)|cudnn(Create|Destroy)\w*": "handles",
    r"cublasSet(Stream|Workspace|MathMode|PointerMode|SmCountTarget)(_v2)?|cudnnSet\w+|cublasLt\w+SetAttribute": "handles",
    r"cublas([SDCZH]|Gemm|SgemmEx)\w*|cublasLtMatmul": "computes, as kernels do: nothing",
    r"cudnnBackend(Finalize|SetAttribute|Execute)|cudnnBatchNormalization\w+|cudnnRNN\w+|cudnnConvolution\w+": "as cuBLAS",
    r"cuda(Device|Graph)(Set|Get)GraphMemAttribute|cudaMemPool(SetAttribute|SetAccess|TrimTo)": "no memory is pooled",
}
"""Names of functions that may do nothing and say that it worked, each with the reason."""


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def torch_libraries() -> Path:
    """The folder of torch's libraries in this environment. RuntimeError where that torch was not built for CUDA."""
    spec = importlib.util.find_spec("torch")
    folder = Path(spec.origin).parent / "lib" if spec and spec.origin else None
    if folder is None or not (folder / "libtorch_cuda.so").exists():
        raise RuntimeError("the torch of this environment was not built for CUDA; `make emulated` installs one that was")
    return folder


def headers() -> Path:
    """The folder of CUDA's headers. RuntimeError where there is none."""
    installed = sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", *installed]
    for home in filter(None, homes):
        if (Path(home) / "include" / "cuda_runtime_api.h").exists():
            return Path(home) / "include"
    raise RuntimeError("the emulated device is built with CUDA's headers: set CUDA_HOME to a toolkit (no driver is needed)")


def _imports(folder: Path) -> tuple[dict[str, str], dict[str, set[tuple[str, str]]]]:
    """(library -> its name with the version, library -> {(symbol, its version or "")}) that torch's libraries import."""
    names: dict[str, str] = {}
    wanted: dict[str, set[tuple[str, str]]] = defaultdict(set)
    defined: set[str] = set()
    unversioned: set[str] = set()
    for file in sorted(folder.glob("lib*.so")):
        library_of, current = {}, ""
        for line in _run("objdump", "-p", str(file)).splitlines():
            if (found := re.search(r"NEEDED\s+(\S+)", line)) and OF_CUDA.match(found[1]):
                names[found[1].split(".so")[0]] = found[1]
            elif found := re.search(r"required from (\S+):", line):
                current = found[1]
            elif current and (found := re.match(r"\s+0x\S+ 0x\S+ \d+ (\S+)", line)):
                library_of[found[1]] = current
        for line in _run("nm", "-D", str(file)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if not re.search(r" [Uw] ", line):
                defined.add(name)
            elif OF_CUDA.match(library := library_of.get(version, "")):
                wanted[library.split(".so")[0]].add((name, version))
            elif not version:
                unversioned.add(name)
    for name in unversioned - defined:
        library = next((library for prefix, library in UNVERSIONED.items() if name.startswith(prefix)), None)
        if library is not None:
            wanted[library].add((name, ""))
    text = (folder / "libc10_cuda.so").read_bytes()
    wanted["libcuda"] |= {(name.decode(), "") for name in re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", text)}  # asked for by name
    names["libnvidia-ml"] = "libnvidia-ml.so.1"  # torch opens it by itself
    return names, wanted


def _generated(library: str, names: Iterator[str]) -> Iterator[str]:
    """C code of the functions that nobody wrote."""
    yield "#include <stdlib.h>"
    yield "void emulated_nothing(const char *name);"
    yield "void emulated_unknown(const char *name);"
    for name in names:
        if re.search(r"Get(Last)?Error(String|Name)?$|GetStatusString|GetResultString", name):
            body = f'return (long)"an error of {library}, which is emulated";'
        elif not any(re.fullmatch(pattern, name) for pattern in NOTHING):
            body = f'emulated_unknown("{name}"); return {ERRORS.get(library, 801)};'
        elif "Create" in name:
            body = f'emulated_nothing("{name}"); if (first) *first = calloc(1, 4096); return 0;'
        else:
            body = f'emulated_nothing("{name}"); return 0;'
        yield f"long {name}(void **first) {{ {body} }}"


def _build(library: str, name: str, wanted: set[tuple[str, str]], out: Path) -> None:
    part = library.removeprefix("lib")
    objects = []
    for source in SOURCES.get(library, ["libraries.cpp"]):
        made = out / f"{part}.{source}.o"
        flags = ["-std=c++17", "-O1", "-fPIC", "-Wall", f"-DPART_{part.replace('-', '_')}", f"-I{headers()}"]
        _run("g++", *flags, "-c", str(CUDA / source), "-o", str(made))
        objects.append(str(made))
    written = {line.split()[-1] for line in _run("nm", "--defined-only", *objects).splitlines() if line.strip()}
    code = out / f"{part}.c"
    code.write_text("\n".join(_generated(library, iter(sorted({symbol for symbol, _ in wanted} - written)))) + "\n")
    _run("gcc", "-O1", "-fPIC", "-w", "-c", str(code), "-o", str(code.with_suffix(".o")))
    script = out / f"{part}.map"
    versions = sorted({version for _, version in wanted if version})
    script.write_text("\n".join(f"{version} {{ global: *; }};" for version in versions) + "\n")
    linked = [] if library == "libcudart" else [f"-L{out}", f"-l:{_runtime(out)}"]
    versioned = [f"-Wl,--version-script={script}"] if versions else []
    soname = ["-shared", f"-Wl,-soname,{name}", "-Wl,-rpath,$ORIGIN"]
    _run("g++", *objects, str(code.with_suffix(".o")), *versioned, *soname, "-o", str(out / name), *linked, "-ldl")


def _runtime(out: Path) -> str:
    return next(out.glob("libcudart.so.*")).name


def _build_operators(out: Path) -> None:
    """What computes ATen's operators (cuda/operators.cpp), against the headers of torch."""
    torch = torch_libraries().parent
    own = torch / "include"
    include = [f"-I{folder}" for folder in (own, own / "torch" / "csrc" / "api" / "include", headers())]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    linked = [f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda", f"-L{out}", f"-l:{_runtime(out)}"]
    _run("g++", *flags, *include, str(CUDA / OPERATORS), "-o", str(out / "operators.so"), *linked)


def build(out: Path = FOLDER) -> Path:
    """The libraries in a folder, built anew where their sources or torch are others than those it was built from."""
    folder = torch_libraries()
    sources = [Path(__file__), *sorted(CUDA.iterdir())]
    text = b"".join(source.read_bytes() for source in sources) + str((folder / "libtorch_cuda.so").stat()).encode()
    key, out = hashlib.sha256(text).hexdigest(), out.absolute()
    stamp = out / "key"
    if stamp.exists() and stamp.read_text() == key:
        return out
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    names, wanted = _imports(folder)
    for library in sorted(names, key=lambda library: library != "libcudart"):  # the others are linked to it
        _build(library, names[library], wanted[library], out)
    _build_operators(out)
    stamp.write_text(key)
    return out


if __name__ == "__main__":
    print(build(*map(Path, sys.argv[1:])))
