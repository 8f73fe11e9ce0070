#!/bin/sh
# Builds the virtual GPU for the torch of a Python, where that is not done yet, and prints the
# folder: ./build.sh PYTHON. Needs g++ and nm. A folder is named by a hash of the source and of the
# libraries, in the environment of that Python or in VGPU_BUILD.
set -e
here=$(cd "$(dirname "$0")" && pwd)
python=${1:-python3}
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
include=$site/nvidia/cu13/include
[ -f "$include/cuda_runtime_api.h" ] || { echo "$python has no torch for CUDA 13" >&2; exit 1; }
key=$({ cat "$here"/*.cpp "$here/build.sh"
  ls -d "$site"/torch-*.dist-info "$site"/bitsandbytes-*.dist-info 2>/dev/null; } | cksum | tr ' ' -)
final=${VGPU_BUILD:-$("$python" -c 'import sys; print(sys.prefix)')/virtual_gpu}/$key
if [ -f "$final/libvgpu.so" ]; then echo "$final"; exit; fi

mkdir -p "$(dirname "$final")"
out=$(mktemp -d "$final.XXXXXX") # another process may build as well: the first to end is kept
trap 'rm -rf "$out"' EXIT
mkdir "$out/crt"
# The wheels have the headers of the runtime, but not the one that names the compiler's attributes.
if [ ! -f "$include/crt/host_defines.h" ]; then
  for name in '__host__' '__device__' '__global__' '__shared__' '__constant__' '__managed__' \
    '__cudart_builtin__' '__device_builtin__' '__device_builtin_texture_type__' \
    '__builtin_align__(n) __attribute__((aligned(n)))' '__align__(n) __attribute__((aligned(n)))' \
    '__device_builtin_surface_type__' 'CUDARTAPI' 'CUDARTAPI_CDECL' 'CUDAAPI' '__no_return__' \
    '__forceinline__ inline' '__inline_hint__' '__specialization_static static' '__location__(a)'; do
    echo "#define $name"
  done > "$out/crt/host_defines.h"
fi
g++ -std=c++17 -O1 -fPIC -Wall -I"$include" -I"$out" -c "$here/virtual_gpu.cpp" -o "$out/own.o"
# A stub for every function that torch or bitsandbytes imports and that is not written out.
nm -g --defined-only "$out/own.o" | awk '{print $NF}' | sort -u > "$out/own.txt"
find "$site/torch/lib" "$site/bitsandbytes" -name '*.so' -exec nm -D --undefined-only {} \; \
  2>/dev/null | awk '{print $2}' | sed 's/@.*//' |
  grep -E '^(__cuda[A-Z]|cuda[A-Z]|cublas|cudnn|cu[A-Z])' | grep -v '^cuFile' | sort -u |
  comm -23 - "$out/own.txt" > "$out/stubs.txt"
{
  echo 'int vgpu_library_call(const char *);'
  sed 's/.*/int &(void) { return vgpu_library_call("&"); }/' "$out/stubs.txt"
} > "$out/stubs.c"
gcc -O1 -fPIC -c "$out/stubs.c" -o "$out/stubs.o"
g++ -shared -Wl,-soname,libvgpu.so -o "$out/libvgpu.so" "$out/own.o" "$out/stubs.o" -ldl -lpthread
ln -s libvgpu.so "$out/libcuda.so.1"
ln -s libvgpu.so "$out/libnvidia-ml.so.1"
chmod 755 "$out"
mv -T "$out" "$final" 2>/dev/null || [ -f "$final/libvgpu.so" ]
echo "$final"
