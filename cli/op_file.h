// One call of an operator in a safetensors file: inputs, attributes in the metadata, `expected.*`.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/compare.h"
#include "core/dynamic_call.h"
#include "ehc/memory.h"
#include "tables/safetensors.h"

namespace ehc::cli {

using Settings = std::vector<std::pair<std::string, std::string>>;  // --set key=value

struct OpFile {
  std::map<std::string, Tensor> inputs;
  std::map<std::string, Tensor> expected;  // without the prefix
  std::optional<std::string> metadata;     // JSON of key "ehc"
};

// Splits the tensors of a file; they stay owned by it.
OpFile read_op_file(const tables::SafetensorsFile& file);

// Binds inputs, attributes of the metadata and then the settings. Returns the tolerances that the
// metadata name, by output.
std::map<std::string, Tolerance> bind_op_file(DynamicCall& call, const OpFile& file,
                                              const Settings& settings);

// Outputs of one run, in host memory.
struct OpResult {
  struct Output {
    size_t slot = 0;
    std::string name;
    Tensor tensor;
    bool partial = false;  // compared after summing over the first axis
  };
  std::vector<Output> outputs;
  std::vector<Buffer> memory;
};

// Allocates outputs, runs the call on a device, brings the outputs back.
OpResult run_call(DynamicCall& call, Device device, const std::string& implementation, int threads);

}  // namespace ehc::cli
