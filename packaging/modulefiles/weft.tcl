#%Module1.0
# For Environment Modules: copy to MODULEPATH/weft/0.1.0 and say where `cmake --install build --prefix PREFIX` put weft.
set prefix /opt/weft/0.1.0

proc ModulesHelp {} {
    puts stderr "weft: training and running video and vision models under MPI. Inputs and job scripts: \$WEFT_SHARE."
}
module-whatis "weft 0.1.0: video and vision models as an MPI batch application"

# What it was built with; names differ from place to place.
# module load openmpi/4.1 hdf5 onednn ffmpeg opencv cuda/12.8 nccl

prepend-path PATH $prefix/bin
prepend-path PYTHONPATH $prefix/share/weft/python
setenv WEFT_SHARE $prefix/share/weft
# For the job scripts.
setenv WEFT $prefix/bin/weft
