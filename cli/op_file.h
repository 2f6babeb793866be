// One call of an operator in a safetensors file: inputs, attributes in the metadata, `expected.*`.
#pragma once

#include <map>
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
  std::string metadata;                    // JSON of key "ehc", or empty
};

// Splits the tensors of a file; they stay owned by it.
OpFile read_op_file(const tables::SafetensorsFile& file);

// Binds inputs, attributes of the metadata and then the settings.
void bind_op_file(DynamicCall& call, const OpFile& file, const Settings& settings);

// Tolerances named in the metadata.
std::map<std::string, Tolerance> tolerances(const Schema& schema, const std::string& metadata);

// Outputs of one run, in host memory.
struct OpResult {
  struct Output {
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
