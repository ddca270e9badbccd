"""How tests, and scripts of validation/, start ranks on this host with any MPI (docs/mpi.md): launcher_of(weft) -n N, with
MPI_ON_ONE_HOST in the environment."""

import os
import pathlib
import re

# As in tests/CMakeLists.txt. Open MPI loads no libraries of networks, which wait 0.2 s for clocks of cards that are not there.
MPI_ON_ONE_HOST = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                   "OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none",
                   "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
                   "OMPI_MCA_pml": "ob1", "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}


def launcher_of(weft):
    """The mpiexec for this weft: WEFT_MPIEXEC, else that of the MPI it was built with (its build folder says), else the PATH's."""
    try:
        cache = (pathlib.Path(weft).parent / "CMakeCache.txt").read_text()
    except OSError:
        cache = ""
    found = re.search(r"(?m)^MPIEXEC_EXECUTABLE:\w+=(/.+)$", cache)
    return os.environ.get("WEFT_MPIEXEC") or (found[1] if found else "mpiexec")
