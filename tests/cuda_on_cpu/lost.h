// A GPU that is lost to its process, as after a kernel's illegal access: every call fails.
#pragma once

namespace emulation {

// Once what WEFT_EMULATION_FAULT orders (README.md) has happened. No queued work runs any more.
bool gpu_is_lost();
// For the beginning of a call: true where it fails, because the GPU is lost or is lost with this
// very call. The first that fails is named on stderr.
bool call_fails(const char* call);
// The same for a call that has waited: a kernel may have faulted meanwhile.
bool failed_meanwhile(const char* call);
// For a kernel that begins: true where it is the one that faults.
bool kernel_faults();

}  // namespace emulation
