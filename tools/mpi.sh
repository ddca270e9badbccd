# shellcheck shell=bash
# Sourced by scripts that start a few ranks on this host, with any MPI (docs/mpi.md), after the build. Sets `mpiexec`, the launcher of
# the MPI that weft was built with, and what it takes to share the host's cores. MPICH ignores Open MPI's variables.

# MPIEXEC=path: another launcher, for a weft that was not built here.
mpiexec=${MPIEXEC:-$(sed -n 's/^MPIEXEC_EXECUTABLE:[A-Z]*=//p' build/CMakeCache.txt 2>/dev/null)} || true
mpiexec=${mpiexec:-mpirun}

# By default Open MPI binds each rank to one core, starts no more ranks than there are, and refuses to run as root.
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  export OMPI_MCA_btl_vader_single_copy_mechanism=none # often forbidden in containers
fi
