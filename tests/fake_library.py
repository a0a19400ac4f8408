"""Shared libraries that play a driver or a fabric library in the doctor's tests."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

from moecomm.emulator.build import find_compiler

# Two GPUs without peer access from 1 to 0; `cuInit` does what the macro says.
CUDA = r"""
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
extern "C" {
int cuInit(unsigned) { INIT }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuGetErrorName(int, const char** s) { *s = "CUDA_ERROR_SYSTEM_NOT_READY"; return 0; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
int cuDeviceGet(int* d, int ordinal) { *d = ordinal + 40; return 0; }
int cuDeviceGetName(char* s, int n, int d)
{
    strncpy(s, d == 40 ? "Fake A" : "Fake B", n);
    return 0;
}
int cuDeviceGetPCIBusId(char* s, int n, int) { strncpy(s, "0000:1b:00.0", n); return 0; }
int cuDeviceTotalMem_v2(size_t* m, int) { *m = (size_t)141 << 30; return 0; }
int cuDeviceGetAttribute(int* v, int attribute, int)
{
    switch (attribute) {
    case 16: *v = 132; return 0;
    case 75: *v = 9; return 0;
    case 76: *v = 0; return 0;
    case 103: *v = 1; return 0;
    }
    return 1;
}
int cuDeviceCanAccessPeer(int* can, int a, int b) { *can = a == 0 && b == 1; return 0; }
}
"""

NVML = r"""
#include <cstring>
struct Info { unsigned char uuid[16]; int status; unsigned clique; unsigned char state; };
extern "C" {
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** h)
{
    *h = (void*)7;
    return strcmp(id, "0000:1b:00.0");
}
int nvmlDeviceGetGpuFabricInfo(void* h, Info* info) { info->state = 2; return h != (void*)7; }
}
"""

NVSHMEM = r"""
extern "C" int nvshmemx_vendor_get_version_info(int* a, int* b, int* c)
{
    *a = MAJOR; *b = MINOR; *c = PATCH;
    return 0;
}
"""

# Only what the doctor reads stands at its place in struct fi_info.
FABRIC = r"""
#include <cstdlib>
#include <cstring>
#include <cstdio>
struct Attr { void* fabric; char* name; char* provider; };
struct Info { Info* next; char before[96]; Attr* attr; };
static_assert(sizeof(void*) == 8 && __builtin_offsetof(Info, attr) == 104, "fi_info");
extern "C" {
unsigned fi_version() { return 1u << 16 | 17; }
int fi_getinfo(unsigned version, const char*, const char*, unsigned long, void* hints, Info** out)
{
    if (version != (1u << 16 | 17) || hints) return -38;
    puts("noise on stdout");
    BEHAVIOUR
    static char tcp[] = "tcp;ofi_rxm", efa[] = "efa";
    static Attr attrs[2] = {{0, 0, tcp}, {0, 0, efa}};
    static Info infos[3] = {
        {&infos[1], {}, &attrs[0]}, {&infos[2], {}, &attrs[1]}, {0, {}, &attrs[0]}};
    *out = infos;
    return 0;
}
}
"""


def build(path: Path, source: str, **macros: object) -> Path:
    """Compile ``source`` to the shared object ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    command = [*find_compiler(), "-shared", "-fPIC", *defines, "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, capture_output=True)
    return path


def fat_binary(*archs: int) -> bytes:
    """Bytes of a device archive with machine code for ``archs``."""
    body = b"".join(
        struct.pack("<HHIQIIHHI", 2, 0x101, 64, 16, 0, 0, 8, 1, arch).ljust(80, b"\0")
        for arch in archs
    )
    return b"!<arch>\n" + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
