-- For Lmod: module use PREFIX/share/weft/modulefiles, or copy to MODULEPATH/weft. cmake --install fills in the prefix.
local prefix = "@PREFIX@"

help([[weft: training and running video and vision models under MPI. Inputs and job scripts: $WEFT_SHARE.]])
whatis("Name: weft")
whatis("Version: @VERSION@")
whatis("Description: video and vision models as an MPI batch application")
whatis("License: Apache-2.0")

conflict("weft")  -- one version at a time

-- What it was built with; names differ from place to place.
-- depends_on("openmpi/4.1", "hdf5", "onednn", "ffmpeg", "opencv", "cuda/12.8", "nccl")

prepend_path("PATH", pathJoin(prefix, "bin"))
prepend_path("MANPATH", pathJoin(prefix, "share/man"))
append_path("MANPATH", "")  -- an empty element: the system's own pages too
prepend_path("PYTHONPATH", pathJoin(prefix, "share/weft/python"))
setenv("WEFT_SHARE", pathJoin(prefix, "share/weft"))
-- For the job scripts.
setenv("WEFT", pathJoin(prefix, "bin/weft"))
-- setenv("WEFT_ENV", "/etc/weft.env")  -- in place of $WEFT_SHARE/jobscripts/weft.env
