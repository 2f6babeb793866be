// The golden files of every operator of this build, on every implementation that takes them.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "cli/op_file.h"
#include "core/registry.h"
#include "ehc/error.h"

namespace ehc::cli {
namespace {

constexpr std::string_view kSuffix = ".safetensors";

// "engram.hash" of "engram.hash.3.safetensors".
std::string operator_of(const std::string& file) {
  return file.substr(0, file.rfind('.', file.size() - kSuffix.size() - 1));
}

std::vector<std::string> golden_files() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(EHC_SOURCE_DIR "/tests/golden")) {
    const std::string name = entry.path().filename();
    if (entry.path().extension() != kSuffix) continue;
    if (find_operator(operator_of(name)) != nullptr) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

class GoldenFile : public testing::TestWithParam<std::string> {};

TEST_P(GoldenFile, EveryImplementationAgrees) {
  const auto input = tables::SafetensorsFile::open(EHC_SOURCE_DIR "/tests/golden/" + GetParam());
  const Operator& op = *find_operator(operator_of(GetParam()));
  const OpFile file = read_op_file(input);
  ASSERT_FALSE(file.expected.empty());
  int ran = 0;
  for (const Implementation& impl : op.implementations) {
    if (impl.device != Device::cpu) continue;
    SCOPED_TRACE(impl.name);
    DynamicCall call(op);
    const auto rules = bind_op_file(call, file, {});
    OpResult result;
    try {
      result = run_call(call, Device::cpu, std::string(impl.name), 2);
    } catch (const Error& e) {
      ASSERT_EQ(e.kind(), ErrorKind::unavailable) << e.what();
      continue;
    }
    ++ran;
    size_t compared = 0;
    for (const OpResult::Output& output : result.outputs) {
      const auto expected = file.expected.find(output.name);
      if (expected == file.expected.end()) continue;
      ++compared;
      const auto rule = rules.find(output.name);
      const Comparison c = compare(
          output.tensor, expected->second,
          rule != rules.end() ? rule->second : default_tolerance(expected->second), output.partial);
      EXPECT_TRUE(c.equal) << output.name << ": " << c.note << " max error " << c.max_error << ", "
                           << c.max_ulp << " ulp, " << c.failing << " elements";
    }
    EXPECT_EQ(compared, file.expected.size()) << "an expected tensor is not an output";
  }
  EXPECT_GE(ran, 1) << "no implementation took the call";
}

TEST(Golden, EveryOperatorHasFiles) {
  const std::vector<std::string> files = golden_files();
  for (const Operator* op : all_operators()) {
    EXPECT_GE(
        std::count_if(files.begin(), files.end(),
                      [&](const std::string& f) { return operator_of(f) == op->schema.name; }),
        2)
        << op->schema.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Files, GoldenFile, testing::ValuesIn(golden_files()),
                         [](const auto& file) {
                           std::string name =
                               file.param.substr(0, file.param.size() - kSuffix.size());
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

}  // namespace
}  // namespace ehc::cli
