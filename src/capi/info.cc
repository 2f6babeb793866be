// What this build and this machine offer, as JSON.
#include <nlohmann/json.hpp>
#include <string>

#include "backends/cpu/isa.h"
#include "capi/status.h"
#include "core/cuda_support.h"
#include "ehc/version.h"

using nlohmann::json;

namespace {

std::string build_info() {
  json sets = json::array();
  for (const ehc::Isa isa : ehc::kEachIsa) {
    if (ehc::cpu_supports(isa)) sets.push_back(ehc::isa_name(isa));
  }
#if EHC_HAS_OPENBLAS
  const char* product = "OpenBLAS";
#else
  const char* product = "built in";
#endif
  return json{{"version", EHC_VERSION_STRING},
              {"instruction_sets", sets},
              {"matrix_product", product},
              {"cuda", ehc::cuda_support::is_built()}}
      .dump();
}

std::string device_info() {
  json devices = json::array();
  for (int i = 0; i < ehc::cuda_support::device_count(); ++i) {
    devices.push_back({{"index", i}, {"description", ehc::cuda_support::describe_device(i)}});
  }
  return devices.dump();
}

}  // namespace

extern "C" {

const char* ehc_build_info(void) {
  return ehc::capi::guarded_value<const char*>(nullptr, [] {
    static const std::string text = build_info();
    return text.c_str();
  });
}

const char* ehc_device_info(void) {
  return ehc::capi::guarded_value<const char*>(nullptr, [] {
    thread_local std::string text;
    text = device_info();
    return text.c_str();
  });
}

}  // extern "C"
