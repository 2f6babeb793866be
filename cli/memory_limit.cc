#include "cli/memory_limit.h"

#include <fmt/format.h>
#include <unistd.h>

#include "ehc/error.h"

namespace ehc::cli {

void require_memory(double bytes, const std::string& what, const std::string& remedy) {
  const double present =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  if (bytes <= 0.8 * present) return;
  throw Error(ErrorKind::unavailable,
              fmt::format("memory: {} need {:.1f} GB of this machine's {:.1f}; take {}", what,
                          bytes * 1e-9, present * 1e-9, remedy));
}

}  // namespace ehc::cli
