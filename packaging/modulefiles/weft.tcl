#%Module1.0
# For Environment Modules: module use PREFIX/share/weft/modulefiles, or copy to MODULEPATH/weft. cmake --install fills in
# the prefix.
set prefix "@PREFIX@"

proc ModulesHelp {} {
    puts stderr "weft: training and running video and vision models under MPI. Inputs and job scripts: \$WEFT_SHARE."
}
module-whatis "weft @VERSION@: video and vision models as an MPI batch application"

# One version at a time.
conflict weft

# What it was built with; names differ from place to place.
# module load openmpi/4.1 hdf5 onednn ffmpeg opencv cuda/12.8 nccl

prepend-path PATH $prefix/bin
prepend-path MANPATH $prefix/share/man
append-path MANPATH {}  ;# an empty element: the system's own pages too
prepend-path PYTHONPATH $prefix/share/weft/python
setenv WEFT_SHARE $prefix/share/weft
# For the job scripts.
setenv WEFT $prefix/bin/weft
# setenv WEFT_ENV /etc/weft.env    ;# in place of $WEFT_SHARE/jobscripts/weft.env
