// Where there is nothing to add up, targets of accumulation keep their bits: -0 + 0 would be +0.
#include <cstring>

#include "tests/backends/cuda/device_support.h"

namespace ehc {
namespace {

class Targets : public test::OnEachDevice {};

bool has(const Schema& schema, Symbol s) { return (schema.symbols >> s & 1U) != 0; }

// A case of an operator without tokens, or without partials where those are summed, that has
// `targets` and the optional inputs whose gradients they are for. Values are zeros of both signs.
cli::CaseInputs inputs_of_nothing(const Operator& op, const std::string& targets) {
  cli::CaseLine line = test::first_case(op);
  std::string with = line.get("with") + targets;
  for (const char* input : {"conv_weight", "norm_weight", "layer_norm_weight"}) {
    const int at = op.schema.tensor_index(input, false);
    if (at >= 0 && op.schema.tensors[static_cast<size_t>(at)].is_optional) {
      with += "," + std::string(input);
    }
  }
  line.set("with", with.front() == ',' ? with.substr(1) : with);
  const auto choose = [&](const char* attribute, const char* value) {
    if (op.schema.attribute_index(attribute) >= 0) line.set(attribute, value);
  };
  choose("layer_norm_eps", "1e-6");
  choose("conv_eps", "1e-5");
  choose("dilation", "3");
  if (has(op.schema, symbol("w"))) line.set("w", "4");
  line.set(has(op.schema, symbol("T")) ? "T" : "P", "0");
  line.set("fill", "zero");
  return {op, line};
}

bool is_all_zeros(const Tensor& t) {
  const std::vector<char> zeros(bytes_of(t));
  return std::memcmp(t.data, zeros.data(), zeros.size()) == 0;
}

// Outputs in memory of their own and in that of their targets, rows side by side and apart.
void expect_kept(Context& context, const cli::CaseInputs& inputs,
                 const std::string& implementation) {
  const Schema& schema = inputs.op().schema;
  for (const cli::Layout layout :
       {cli::Layout::contiguous, cli::Layout::strided, cli::Layout::aliased}) {
    const cli::RunResult result =
        cli::run_case(inputs, inputs.tensors(), context, {implementation, layout});
    EXPECT_EQ(result.damage, "") << implementation;
    for (const cli::RunResult::Output& output : result.outputs) {
      if (output.tensor.numel() == 0) continue;
      const std::string what = implementation + " " + inputs.name_of(output.slot) + " " +
                               std::string(cli::name_of(layout));
      const int8_t target = inputs.spec_of(output.slot).alias_index;
      const Tensor* before =
          target < 0 ? nullptr : inputs.input(schema.tensors[static_cast<size_t>(target)].name);
      if (before == nullptr || !before->present()) {
        EXPECT_TRUE(is_all_zeros(output.tensor)) << what;
        continue;
      }
      EXPECT_FALSE(is_all_zeros(*before)) << what << ": expected some -0 to see a difference";
      EXPECT_EQ(std::memcmp(before->data, output.tensor.data, bytes_of(*before)), 0) << what;
    }
  }
}

TEST_P(Targets, KeepTheirBitsWhereNothingIsAdded) {
  if (GetParam() == Device::cuda) EHC_NEEDS_DEVICE();
  Context on = context();
  int operators = 0;
  for (const Operator* op : all_operators()) {
    if (!has(op->schema, symbol("T")) && !has(op->schema, symbol("P"))) continue;
    std::vector<std::string> targets;
    for (const TensorSpec& s : op->schema.tensors) {
      if (s.is_target()) targets.push_back("," + std::string(s.name));
    }
    if (targets.empty()) continue;
    ++operators;
    std::string all;
    for (const std::string& target : targets) all += target;
    for (const std::string& some : {all, targets.back()}) {
      const cli::CaseInputs inputs = inputs_of_nothing(*op, some);
      for (const Implementation& impl : op->implementations) {
        if (impl.device == GetParam()) expect_kept(on, inputs, std::string(impl.name));
      }
    }
  }
  EXPECT_GE(operators, 14);
}

INSTANTIATE_TEST_SUITE_P(Devices, Targets, testing::Values(Device::cpu, Device::cuda),
                         [](const auto& device) {
                           return std::string(device.param == Device::cpu ? "cpu" : "cuda");
                         });

}  // namespace
}  // namespace ehc
