#include "faults.h"

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>

#include "fibers.h"

namespace emulation {
namespace {

// Kernels are often in unnamed namespaces, which dladdr() does not see, so the file's own table is
// read.
std::string symbol_at(std::uintptr_t offset) {
  // Mapped once: each kernel asks at its first launch.
  static const std::span<const char> image = [] {
    const int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    struct stat s {};
    void* p = MAP_FAILED;
    if (file >= 0 && fstat(file, &s) == 0)
      p = mmap(nullptr, static_cast<std::size_t>(s.st_size), PROT_READ, MAP_PRIVATE, file, 0);
    if (file >= 0) close(file);
    if (p == MAP_FAILED) return std::span<const char>();
    return std::span(static_cast<const char*>(p), static_cast<std::size_t>(s.st_size));
  }();
  if (image.size() < sizeof(Elf64_Ehdr)) return "";
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(image.data());
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(image.data() + header->e_shoff);
  for (int s = 0; s < header->e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const char* names = image.data() + sections[sections[s].sh_link].sh_offset;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(image.data() + sections[s].sh_offset);
    for (std::size_t i = 0; i < sections[s].sh_size / sizeof(Elf64_Sym); ++i)
      if (symbols[i].st_value == offset && ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC)
        return names + symbols[i].st_name;
  }
  return "";
}

void handler(int signal_number, siginfo_t* info, void*) {
  const char* fiber_memory = describe_fiber_memory(info->si_addr);
  const std::string device = describe_device_address(info->si_addr);
  if (running_kernel() == nullptr && device.empty()) {
    signal(signal_number, SIG_DFL);  // not ours: the access faults again
    return;
  }
  if (signal_number == SIGILL) die("misaligned access");
  if (!device.empty())
    die("illegal access at %p, %s%s", info->si_addr, device.c_str(),
        running_kernel() == nullptr ? ", by the host" : "");
  if (fiber_memory != nullptr) die("illegal access at %p: %s", info->si_addr, fiber_memory);
  die("illegal or misaligned access at %p", info->si_addr);
}

}  // namespace

std::string name_of(const void* function) {
  std::uintptr_t base = 0;
  // The first object is the program itself.
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* to) {
        *static_cast<std::uintptr_t*>(to) = info->dlpi_addr;
        return 1;
      },
      &base);
  const auto address = reinterpret_cast<std::uintptr_t>(function);
  const std::string mangled = symbol_at(address - base);
  if (mangled.empty()) {
    char text[32];
    std::snprintf(text, sizeof text, "at %p", function);
    return text;
  }
  int status = 0;
  char* plain = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  std::string name = status == 0 ? plain : mangled;
  std::free(plain);
  // Without the parameters and a template's "void " before: the parenthesis that matches the last
  // one.
  if (const auto end = name.rfind(')'); end != std::string::npos) {
    int depth = 0;
    for (std::size_t i = end + 1; i-- > 0;) {
      depth += name[i] == ')' ? 1 : name[i] == '(' ? -1 : 0;
      if (depth == 0) {
        if (i > 0) name.resize(i);
        break;
      }
    }
  }
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);
  return name;
}

void catch_faults() {
  static thread_local bool done = false;
  if (done) return;
  done = true;
  // Faults of a fiber whose stack is full need another stack.
  stack_t stack{};
  stack.ss_size = 256 * 1024;
  stack.ss_sp =
      mmap(nullptr, stack.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  sigaltstack(&stack, nullptr);
  struct sigaction action {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (const int s : {SIGSEGV, SIGBUS, SIGILL}) sigaction(s, &action, nullptr);
}

void die(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fflush(stdout);
  std::fprintf(stderr, "cuda_on_cpu: %s%s\n", text, where().c_str());
  std::fflush(stderr);
  signal(SIGABRT, SIG_DFL);
  std::abort();
}

}  // namespace emulation
