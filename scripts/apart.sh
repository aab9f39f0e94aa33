# shellcheck shell=bash
# Shared by the tests of builds that are not the real one.  Such a build lies in build/NAME: its kernels in native/, and in
# python/ the package as links to the sources with those kernels in it.  What everything else uses is not touched.
# Sourced after setup.sh, never run.

# build_apart NAME PYTHON CMAKE_ARGUMENT...
build_apart() {
    local build=$PWD/build/$1 log=$PWD/build/$1.log python=$2 kernels=$PWD/build/$1/python/penstock/kernels
    shift 2
    say "Building the kernels in $build"
    mkdir -p "$build"
    local PATH=${python%/*}:$PATH
    {
        cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "$@" -DPython_EXECUTABLE="$python" &&
            cmake --build "$build"
    } >"$log" 2>&1 || { cat "$log" >&2; fail "the kernels do not build" "Above is the log, kept in $log."; }
    rm -rf "$build/python"
    mkdir -p "$build/python"
    cp -rs "$PWD/src/penstock" "$build/python/"
    rm -f "$kernels"/_native*.so
    ln -s "$build"/native/_native*.so "$kernels/"
}
