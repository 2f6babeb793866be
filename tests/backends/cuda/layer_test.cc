// engram.layer_fwd in one kernel has the bits of the same in two, however its runs are cut.
#include "core/forced_grid.h"
#include "tests/backends/cuda/device_support.h"

namespace ehc {
namespace {

constexpr const char* kOperator = "engram.layer_fwd";
constexpr const char* kDefaults = " eps=1e-6 clamp=1e-6 w=4 conv_eps=1e-5 A=BF16 W=BF16";

class LayerKernels : public testing::Test {
 protected:
  void SetUp() override {
    EHC_NEEDS_DEVICE();
    stream_.emplace(0);
    context_.emplace(Context::cuda(0, stream_->get()));
  }
  cli::RunResult run(const cli::CaseInputs& inputs, const char* implementation) {
    return cli::run_case(inputs, inputs.tensors(), *context_,
                         {implementation, cli::Layout::contiguous, 0xcd});
  }
  // Skips on devices that the kernel is not for.
  void compare(const std::string& words, std::initializer_list<int64_t> grids, int repeats = 1) {
    const bool names_dilation = words.find("dilation=") != std::string::npos;
    const cli::CaseLine line = cli::parse_cases(std::string(kOperator) + kDefaults +
                                                    (names_dilation ? " " : " dilation=3 ") + words,
                                                "test")
                                   .front();
    const cli::CaseInputs inputs(*find_operator(kOperator), line);
    const cli::RunResult two = run(inputs, "cuda");
    ASSERT_EQ(two.refusal, "") << words;
    for (const int64_t blocks : grids) {
      const ForcedGrid grid(blocks);
      for (int i = 0; i < repeats; ++i) {
        const cli::RunResult one = run(inputs, "cuda.sm90");
        if (one.refusal.find("compute capability") != std::string::npos) GTEST_SKIP();
        ASSERT_EQ(one.refusal, "") << words;
        ASSERT_EQ(one.damage, "") << words;
        ASSERT_TRUE(test::bits_of(one) == test::bits_of(two)) << words << ", grid " << blocks;
      }
    }
  }

 private:
  std::optional<cuda_graph::Stream> stream_;
  std::optional<Context> context_;
};

// Runs of every length from one token on, chains that begin and end in them.
TEST_F(LayerKernels, GiveTheSameBitsWhereverRunsAreCut) {
  for (const char* tokens : {"1", "2", "3", "4", "9", "31"}) {
    compare("n=4 d=64 with=conv_weight save=true T=" + std::string(tokens),
            {1, 4, 8, 12, 40, 4096});
  }
  compare("n=4 T=257 d=256 with=conv_weight rounding=twice", {1, 5, 20, 100, 400, 4096});
}

TEST_F(LayerKernels, GiveTheSameBitsInSequencesAndBetweenImages) {
  for (const char* rounding : {"once", "twice"}) {
    const std::string words = std::string(" rounding=") + rounding;
    compare("n=4 T=97 d=264 with=conv_weight,cu_seqlens B=7" + words, {1, 16, 40, 4096});
    for (const char* mask : {"none", "all", "alternating", "random", "first", "last"}) {
      compare(
          "n=4 T=70 d=520 save=true B=3 with=conv_weight,key,cu_seqlens,image_token_mask mask=" +
              std::string(mask) + words,
          {1, 16, 40, 4096});
    }
  }
  compare("n=4 T=40 d=64 with=conv_weight fill=extreme save=true", {1, 16});
  compare("n=4 T=40 d=64 with=conv_weight fill=nan save=true", {1, 16});
}

TEST_F(LayerKernels, GiveTheSameBitsAtTheWidthsOfModels) {
  for (const char* width :
       {"8", "16", "512", "520", "1280", "2560", "4096", "4104", "5120", "5640", "7168"}) {
    for (const char* rounding : {"once", "twice"}) {
      compare(
          std::string("n=4 T=150 with=conv_weight save=true d=") + width + " rounding=" + rounding,
          {0x7fff, 132, 8});
    }
  }
  compare("T=60 d=4096 n=2 with=conv_weight", {132});
  compare("T=60 d=600 n=3 with=conv_weight", {132});
  compare("T=60 d=600 n=8 dilation=2 with=conv_weight", {132});
}

TEST_F(LayerKernels, GiveTheSameBitsManyTimes) {
  compare("n=4 T=2000 d=4096 with=conv_weight", {132}, 2);
  compare("n=4 T=1000 d=7168 with=conv_weight", {132}, 2);
}

}  // namespace
}  // namespace ehc
