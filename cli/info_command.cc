// `ehc info`: what this build and this machine offer.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <thread>

#include "backends/cpu/isa.h"
#include "cli/commands.h"
#include "core/cuda_support.h"
#include "core/registry.h"
#include "ehc/version.h"

namespace ehc::cli {

namespace {

void run() {
  fmt::print("ehc {}\n", EHC_VERSION_STRING);
  fmt::print("operators           {}\n", all_operators().size());
  fmt::print("threads             {}\n", std::thread::hardware_concurrency());
  std::string sets;
  for (const Isa isa : kEachIsa) {
    if (cpu_supports(isa)) sets += (sets.empty() ? "" : ", ") + std::string(isa_name(isa));
  }
  fmt::print("instruction sets    {}\n", sets);
#if EHC_HAS_OPENBLAS
  fmt::print("matrix product      OpenBLAS\n");
#else
  fmt::print("matrix product      built in\n");
#endif
  if (!cuda_support::is_built()) return fmt::print("CUDA                not in this build\n");
  const int devices = cuda_support::device_count();
  fmt::print("CUDA                built in, {} device{}\n", devices, devices == 1 ? "" : "s");
  for (int i = 0; i < devices; ++i) {
    fmt::print("cuda:{}              {}\n", i, cuda_support::describe_device(i));
  }
}

}  // namespace

void add_info_command(CLI::App& app) {
  app.add_subcommand("info", "Show what this build and this machine offer")->callback(&run);
}

}  // namespace ehc::cli
