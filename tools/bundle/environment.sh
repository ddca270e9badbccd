# shellcheck shell=sh
# Read by the scripts in bin/. WEFT_BUNDLE is the bundle's folder.

# An older glibc would answer with a riddle from the loader.
needed=$(cat "$WEFT_BUNDLE/libexec/glibc" 2>/dev/null)
found=$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)
if [ -n "$needed" ] && [ -n "$found" ] &&
  [ "$(printf '%s\n%s\n' "$needed" "$found" | sort -V | head -n 1)" != "$needed" ]; then
  echo "ERROR: this bundle needs glibc $needed or newer, this machine has $found" >&2
  echo "HINT: build weft on this machine (make build), or run the bundle in a container of a newer system" >&2
  exit 2
fi

# Open MPI: the one in mpi/, or the site's with WEFT_SITE_MPI=1 (libmpi.so.40: Open MPI 3, 4 or 5).
if [ "${WEFT_SITE_MPI:-0}" != 1 ]; then
  case $LD_LIBRARY_PATH: in
    "$WEFT_BUNDLE/mpi/lib:"*) ;;
    *) LD_LIBRARY_PATH=$WEFT_BUNDLE/mpi/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} ;;
  esac
  OPAL_PREFIX=$WEFT_BUNDLE/mpi
  OPAL_SYSCONFDIR=$WEFT_BUNDLE/mpi/etc
  PMIX_PREFIX=$WEFT_BUNDLE/mpi/pmix
  PMIX_LIBDIR=$PMIX_PREFIX/lib PMIX_PKGLIBDIR=$PMIX_PREFIX/lib/pmix
  PMIX_DATAROOTDIR=$PMIX_PREFIX/share PMIX_DATADIR=$PMIX_PREFIX/share PMIX_PKGDATADIR=$PMIX_PREFIX/share/pmix
  export LD_LIBRARY_PATH OPAL_PREFIX OPAL_SYSCONFDIR
  export PMIX_PREFIX PMIX_LIBDIR PMIX_PKGLIBDIR PMIX_DATAROOTDIR PMIX_DATADIR PMIX_PKGDATADIR
  # mpirun starts its daemon on other nodes by this name. It cuts it at blanks, hence not from a folder with one.
  case $WEFT_BUNDLE in
    *[[:space:]]*) ;;
    *) OMPI_MCA_orte_launch_agent=$WEFT_BUNDLE/bin/orted && export OMPI_MCA_orte_launch_agent ;;
  esac
  # Without ssh mpirun would not even start ranks here.
  if [ -z "${OMPI_MCA_plm:-}${OMPI_MCA_plm_rsh_agent:-}" ] && ! command -v ssh >/dev/null && ! command -v rsh >/dev/null; then
    OMPI_MCA_plm=^rsh && export OMPI_MCA_plm
  fi
fi
case :$PATH: in
  *":$WEFT_BUNDLE/bin:"*) ;;
  *) PATH=$WEFT_BUNDLE/bin:$PATH && export PATH ;;
esac

# The folder that has library $1, among those where CUDA's libraries are usually found; empty if the loader needs no help.
# Fails if there is none.
find_cuda_library() {
  old_ifs=$IFS
  IFS=:
  for d in $LD_LIBRARY_PATH; do
    [ -e "$d/$1" ] && IFS=$old_ifs && return 0
  done
  IFS=$old_ifs
  for d in ${WEFT_CUDA_LIBS:+"$WEFT_CUDA_LIBS"} \
    ${VIRTUAL_ENV:+"$VIRTUAL_ENV"/lib/python3*/site-packages/nvidia/*/lib} \
    ${CONDA_PREFIX:+"$CONDA_PREFIX"/lib "$CONDA_PREFIX"/lib/python3*/site-packages/nvidia/*/lib} \
    ${CUDA_HOME:+"$CUDA_HOME"/lib64} ${CUDA_PATH:+"$CUDA_PATH"/lib64} ${NCCL_HOME:+"$NCCL_HOME"/lib} \
    /usr/local/cuda/lib64 /usr/local/cuda-*/lib64 \
    "$HOME"/.local/lib/python3*/site-packages/nvidia/*/lib; do
    [ -e "$d/$1" ] && echo "$d" && return 0
  done
  d=$({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | sed -n "s/^[[:space:]]*$1 .* => //p" | head -n 1)
  [ -n "$d" ] && [ -e "$d" ] && return 0
  for packages in $(python3 -c 'import nvidia; print("\n".join(nvidia.__path__))' 2>/dev/null); do
    for d in "$packages"/*/lib; do
      [ -e "$d/$1" ] && echo "$d" && return 0
    done
  done
  return 1
}

# side=cuda where there are a driver and the libraries that weft-cuda is linked with, otherwise cpu. WEFT_SIDE decides.
choose_side() {
  side=${WEFT_SIDE:-}
  [ -x "$WEFT_BUNDLE/libexec/weft-cuda" ] || side=cpu
  [ -n "$side" ] || { [ -e /dev/nvidiactl ] || [ -e /dev/dxg ]; } || side=cpu
  [ "$side" != cpu ] || return 0
  added=
  missing=
  while read -r library; do
    if d=$(find_cuda_library "$library"); then
      [ -z "$d" ] || added=$added:$d
    else
      missing="$missing $library"
    fi
  done <"$WEFT_BUNDLE/libexec/cuda-libraries"
  if [ -z "$missing" ]; then
    # cuDNN is loaded with the first convolution: jobs without any do without it.
    if [ -e "$WEFT_BUNDLE/libexec/cuda-libraries-on-demand" ]; then
      while read -r library; do
        if d=$(find_cuda_library "$library") && [ -n "$d" ]; then added=$added:$d; fi
      done <"$WEFT_BUNDLE/libexec/cuda-libraries-on-demand"
    fi
    LD_LIBRARY_PATH=$LD_LIBRARY_PATH$added
    export LD_LIBRARY_PATH
    side=cuda
    return 0
  fi
  hint="HINT: load the site's CUDA and NCCL modules, or pip install nvidia-cublas nvidia-nccl-cu13 nvidia-cudnn-cu13, or name a folder: WEFT_CUDA_LIBS=DIR"
  if [ "$side" = cuda ]; then
    echo "ERROR: WEFT_SIDE=cuda, but these libraries are not found:$missing" >&2
    echo "$hint" >&2
    exit 2
  fi
  side=cpu
  # One rank speaks for all.
  if [ "${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${SLURM_PROCID:-0}}}" = 0 ]; then
    echo "WARN: there is an NVIDIA driver here, but not:$missing. weft runs on the CPU" >&2
    echo "$hint" >&2
  fi
}
