// The gate has kernels for many tokens, for few and for any rows; which one runs is a matter of
// shape and alignment, and so of speed alone. What is correct is what `ehc check` asks of each.
#include "core/forced_grid.h"
#include "tests/backends/cuda/device_support.h"

namespace ehc {
namespace {

using cli::Layout;
using cli::RunResult;

class GateKernels : public testing::Test {
 protected:
  void SetUp() override {
    EHC_NEEDS_DEVICE();
    stream_.emplace(0);
  }
  RunResult run(const cli::CaseInputs& inputs, Layout layout) {
    Context context = Context::cuda(0, stream_->get());
    RunResult result = cli::run_case(inputs, inputs.tensors(), context,
                                     {.implementation = "cuda", .layout = layout});
    EXPECT_EQ(result.refusal, "");
    EXPECT_EQ(result.damage, "");
    return result;
  }
  // Rows that are aligned, and padded, against rows that are not, which the kernel for all takes.
  void expect_same_bits(const std::string& lines) {
    for (const cli::CaseLine& line : cli::parse_cases(lines, "test")) {
      const cli::CaseInputs inputs(*find_operator(line.op), line);
      const std::vector<std::string> expected = test::bits_of(run(inputs, Layout::misaligned));
      EXPECT_FALSE(expected.empty());
      for (const Layout layout : {Layout::contiguous, Layout::padded, Layout::strided}) {
        EXPECT_TRUE(test::bits_of(run(inputs, layout)) == expected)
            << line.text() << ", rows " << cli::name_of(layout);
      }
    }
  }

 private:
  std::optional<cuda_graph::Stream> stream_;
};

TEST_F(GateKernels, ForwardGivesTheSameBitsByEveryKernel) {
  expect_same_bits(
      "defaults engram.gate_fwd n=4 eps=1e-6 clamp=1e-6\n"
      "engram.gate_fwd T=1031 d=64|1000 A=BF16|F16|F32 save=true\n"
      "engram.gate_fwd T=521 d=2560|4096|5120|7168 A=BF16 save=true\n"
      "engram.gate_fwd T=521 d=4096 A=F32 save=true\n"
      "engram.gate_fwd T=521 d=8192 A=BF16\n"
      "engram.gate_fwd T=1031 d=576 A=BF16 mode=value with=image_token_mask mask=random\n"
      "engram.gate_fwd T=521 d=7160 A=BF16 save=true with=image_token_mask mask=alternating\n"
      "engram.gate_fwd T=521 d=576 n=2|3|8 A=BF16\n");
}

TEST_F(GateKernels, ForwardOfManyTokensTakesAnyGrid) {
  const std::string lines =
      "engram.gate_fwd T=521 d=64|2560|7168 n=4 A=BF16 eps=1e-6 clamp=1e-6 save=true "
      "with=image_token_mask mask=random\n";
  for (const cli::CaseLine& line : cli::parse_cases(lines, "test")) {
    const cli::CaseInputs inputs(*find_operator(line.op), line);
    const std::vector<std::string> expected = test::bits_of(run(inputs, Layout::contiguous));
    for (const int64_t blocks : {1, 7, 131, 1000}) {
      const ForcedGrid grid(blocks);
      EXPECT_TRUE(test::bits_of(run(inputs, Layout::contiguous)) == expected)
          << line.text() << ", blocks " << blocks;
      EXPECT_TRUE(grid.was_asked()) << line.text();
    }
    const ForcedGrid grid(7);
    EXPECT_TRUE(test::bits_of(run(inputs, Layout::misaligned)) == expected) << line.text();
    EXPECT_FALSE(grid.was_asked())
        << line.text() << ": another kernel takes rows that are not aligned";
  }
}

TEST_F(GateKernels, BackwardGivesTheSameBitsByEveryKernel) {
  expect_same_bits(
      "defaults engram.gate_bwd n=4 A=BF16 eps=1e-6 clamp=1e-6 with=dot\n"
      // Few tokens: whole chunks, and a chunk of one.
      "engram.gate_bwd T=1|8|9|16|128 d=64|4096\n"
      "engram.gate_bwd T=13 d=1000|7168|8192 A=BF16|F16\n"
      "engram.gate_bwd T=21 d=576 with=dot,image_token_mask mask=random\n"
      // Many: a block a chunk, two blocks for two, an odd number of chunks, a chunk of one token.
      "engram.gate_bwd T=513 d=64|1000|4096\n"
      "engram.gate_bwd T=520 d=5128|7168 A=BF16|F16\n"
      "engram.gate_bwd T=513 d=8192\n"
      "engram.gate_bwd T=2049 d=64\n"
      "engram.gate_bwd T=577 d=576|5128 with=dot,image_token_mask mask=random|all\n"
      "engram.gate_bwd T=530 d=576 with=key\n");
}

}  // namespace
}  // namespace ehc
