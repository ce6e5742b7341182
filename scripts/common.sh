# Shared by the scripts here: finding Python and making the virtual environment. Sourced, not run.

# Images of containers often set this. Then each process compiles all modules that it imports, which takes seconds.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

is_python_311() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Prints python3 if it is 3.11 or newer, else the newest python3.N that is; PYTHON overrides.
find_python() {
    if [ -n "${PYTHON:-}" ]; then
        is_python_311 "$PYTHON" || fail "PYTHON=$PYTHON is not Python 3.11 or newer"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.15 python3.14 python3.13 python3.12 python3.11; do
        if is_python_311 "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer was found; install one (python3 --version says: $(python3 --version 2>&1))"
}

# Prints the newest Python 3 that is found on the PATH or among pyenv's versions.
find_newest_python() {
    local best='' best_version='' candidate version
    for candidate in $(compgen -c python3. | grep -E "^python3\.[0-9]+$" | sort -u) "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
        version=$("$candidate" -c 'import sys; print("%03d%03d" % sys.version_info[:2])' 2>/dev/null) || continue
        if [ "$version" \> "$best_version" ]; then
            best=$candidate best_version=$version
        fi
    done
    printf '%s\n' "${best:-python3}"
}

# Steps on a CPU are quicker with huge pages, which the C library asks for if this is set before a process starts.
use_huge_pages() {
    if [ -e /sys/kernel/mm/transparent_hugepage/enabled ] &&
        ! grep -q '\[never\]' /sys/kernel/mm/transparent_hugepage/enabled; then
        case "${GLIBC_TUNABLES:-}" in
            *glibc.malloc.hugetlb*) ;;
            *) export GLIBC_TUNABLES="${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1" ;;
        esac
    fi
}

# size_on_disk EXTRAS: what an environment with them takes, for a person.
size_on_disk() {
    case $1 in
        '') say "about 0.8 GB" ;;
        '[test]') say "about 1.3 GB" ;;
        *) say "several GB" ;;
    esac
}

# make_environment FOLDER EXTRAS: a virtual environment with jaxmnt and these extras in it. It is made anew only when
# what it is made from has changed; extras that it lacks are added.
make_environment() {
    local folder=$1 extras=$2 python stamp
    python=$(find_python) || exit $?
    stamp="$("$python" --version 2>&1) $(cat pyproject.toml constraints.txt | cksum)"
    if [ -x "$folder/bin/python" ] && [ "$(head -n 1 "$folder/.jaxmnt-stamp" 2>/dev/null)" = "$stamp" ]; then
        if ! grep -qxF "with $extras" "$folder/.jaxmnt-stamp"; then
            say "Installing what $extras adds to $folder ($(size_on_disk "$extras") in all) …"
            install_jaxmnt "$folder" "$extras"
            printf 'with %s\n' "$extras" >>"$folder/.jaxmnt-stamp"
        fi
        return
    fi
    if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        fail "$python has no venv module; on Debian or Ubuntu: apt-get install python3-venv"
    fi
    say "Making $folder with $("$python" --version 2>&1)"
    "$python" -m venv --clear "$folder" || fail "the virtual environment $folder could not be made"
    say "Installing jaxmnt$extras and what it needs ($(size_on_disk "$extras") on disk) …"
    install_jaxmnt "$folder" "$extras"
    printf '%s\nwith \nwith %s\n' "$stamp" "$extras" >"$folder/.jaxmnt-stamp"
}

# install_jaxmnt FOLDER EXTRAS: in place, with the tested versions. Python compiles a module when it is first imported, so
# pip need not compile all of them, of which most are never imported.
install_jaxmnt() {
    local code=0
    "$1/bin/python" scripts/pip_progress.py --no-compile -c constraints.txt -e ".$2" || code=$?
    case $code in
        0) ;;
        130) exit 130 ;;  # Ctrl-C, of which nobody needs to be told
        *) fail "the installation failed; the lines above say why" ;;
    esac
}

# run_tests PYTHON MARKS [ARGUMENT …]: most tests side by side, then those whose claim is about time, one after the other
# on a machine that does nothing else. With arguments all of them one after the other.
run_tests() {
    local python=$1 marks=$2
    shift 2
    if [ $# -gt 0 ]; then
        "$python" -m pytest -m "$marks" "$@"
        return
    fi
    local status=0
    run_tests_side_by_side "$python" "$marks" || status=$?
    "$python" -m pytest -m "$marks and alone" || status=$?  # those of the other part that failed are not all there is
    return "$status"
}

# run_tests_side_by_side PYTHON MARKS [FILE …]: those that need not be alone, of these files if they are given. One more at
# a time than there are cores, for some wait for a time limit or for another process; at most 4, for the memory.
run_tests_side_by_side() {
    local workers=$(($(nproc) + 1))
    "$1" -m pytest -m "$2 and not alone" --numprocesses $((workers < 4 ? workers : 4)) --dist worksteal "${@:3}"
}

# The three tiers, as marks of pytest.
quick="not slow and not exhaustive and not gpu"
slow="slow and not exhaustive and not gpu"
all="not gpu"

# share_compiled_programs: what one test compiles no other has to, in all that this script runs. Private, and gone at
# its end.
share_compiled_programs() {
    [ -z "${JAX_COMPILATION_CACHE_DIR:-}" ] || return 0
    JAX_COMPILATION_CACHE_DIR=$(mktemp -d "${TMPDIR:-/tmp}/jaxmnt-test-cache-XXXXXX")
    export JAX_COMPILATION_CACHE_DIR
    trap 'rm -rf "$JAX_COMPILATION_CACHE_DIR"' EXIT
}
