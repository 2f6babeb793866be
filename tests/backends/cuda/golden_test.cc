// The golden files on a device. Where the sources are not, EHC_GOLDEN names their folder.
#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "cli/op_file.h"
#include "tests/backends/cuda/device_support.h"

namespace ehc::cli {
namespace {

std::vector<std::filesystem::path> golden_files(std::string_view op) {
  const char* folder = std::getenv("EHC_GOLDEN");
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(
           folder != nullptr ? folder : EHC_SOURCE_DIR "/tests/golden")) {
    const std::string name = entry.path().filename();
    if (name.starts_with(std::string(op) + ".")) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

TEST(CudaGolden, EveryFileAgrees) {
  EHC_NEEDS_DEVICE();
  for (const Operator* op : test::operators_on(Device::cuda)) {
    const auto files = golden_files(op->schema.name);
    EXPECT_GE(files.size(), 2U) << op->schema.name;
    for (const auto& path : files) {
      SCOPED_TRACE(path.filename().string());
      const auto input = tables::SafetensorsFile::open(path);
      const OpFile file = read_op_file(input);
      DynamicCall call(*op);
      const auto rules = bind_op_file(call, file, {});
      const OpResult result = run_call(call, Device::cuda, {}, 1);
      size_t compared = 0;
      for (const OpResult::Output& output : result.outputs) {
        const auto expected = file.expected.find(output.name);
        if (expected == file.expected.end()) continue;
        ++compared;
        const auto rule = rules.find(output.name);
        const Comparison c =
            compare(output.tensor, expected->second,
                    rule != rules.end() ? rule->second : default_tolerance(expected->second),
                    output.partial);
        EXPECT_TRUE(c.equal) << output.name << ": " << c.note << " max error " << c.max_error
                             << ", " << c.max_ulp << " ulp, " << c.failing << " elements";
      }
      EXPECT_EQ(compared, file.expected.size());
    }
  }
}

}  // namespace
}  // namespace ehc::cli
