#include "ehc/engram/layout.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::context_for;
using test::error_of;
using test::implementations;

TEST(Multipliers, OfPublishedModels) {
  const int64_t layers[] = {1, 14};
  int64_t made[2][4] = {};
  Context context = Context::cpu(1);
  multipliers(context, {.layer_ids = layers,
                        .max_ngram = 4,
                        .compressed_vocab = 99092,
                        .multipliers = {made, DType::i64, {2, 4}}});
  const int64_t expected[2][4] = {{76632096046245, 4839876093313, 35959672319349, 73987337458391},
                                  {67716810739261, 51510806800915, 30921347202721, 82619226485591}};
  for (int l = 0; l < 2; ++l) {
    for (int i = 0; i < 4; ++i) EXPECT_EQ(made[l][i], expected[l][i]);
  }
}

TEST(Multipliers, NoLayersGiveNothing) {
  const int64_t unused = 0;
  int64_t made = 5;
  Context context = Context::cpu(1);
  multipliers(context, {.layer_ids = {&unused, 0},
                        .max_ngram = 2,
                        .compressed_vocab = 9,
                        .multipliers = {&made, DType::i64, {0, 2}}});
  EXPECT_EQ(made, 5);
}

std::vector<int32_t> find_primes(const std::string& implementation, std::vector<int64_t> sizes,
                                 int64_t layers, int64_t heads) {
  const auto orders = static_cast<int64_t>(sizes.size());
  std::vector<int32_t> made(static_cast<size_t>(layers * orders * heads), -1);
  Context context = context_for(implementation);
  try {
    primes(context, {.sizes = sizes,
                     .layers = layers,
                     .heads = heads,
                     .vocab_sizes = {made.data(), DType::i32, {layers, orders, heads}}});
  } catch (const Error&) {
    for (const int32_t prime : made) EXPECT_EQ(prime, -1) << "written in spite of an error";
    throw;
  }
  return made;
}

TEST(Primes, CpuEqualsReference) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{
           {1}, {2, 2}, {50, 20, 50}, {1, 1, 1, 1, 1, 1, 1}, {16000000, 16000000, 16000000}}) {
    const auto expected = find_primes("reference", sizes, 2, 8);
    EXPECT_EQ(find_primes("cpu", sizes, 2, 8), expected);
  }
  const auto demo = find_primes("cpu", {646400, 646400}, 2, 8);
  EXPECT_EQ(demo.front(), 646403);
  EXPECT_EQ(demo.back(), 646879);
}

TEST(Primes, EndBelowTwoToThe31) {
  for (const std::string& impl : implementations("engram.primes")) {
    EXPECT_EQ(find_primes(impl, {2147483640}, 1, 1), std::vector<int32_t>{2147483647}) << impl;
    EXPECT_NE(error_of([&] {
                find_primes(impl, {2147483640}, 1, 2);
              }).find("engram.primes: attribute 'sizes': expected "),
              std::string::npos)
        << impl;
  }
  Context context = Context::cpu(1);
  const int64_t sizes[] = {2};
  EXPECT_EQ(error_of([&] {
              primes(context, {.sizes = sizes, .layers = int64_t{1} << 40, .heads = 1 << 30});
            }),
            "engram.primes: attribute 'layers': expected layers * orders * heads <= 105097565, the "
            "number of primes up to 2^31-1, got 1099511627776 * 1 * 1073741824");
}

TEST(Offsets, RefuseSumsThatIndicesCannotHold) {
  const int32_t sizes[2][1][2] = {{{7, 9}}, {{2147483647, 2}}};
  int64_t wide[2][2];
  int32_t narrow[2][2];
  Context context = Context::cpu(1);
  const Tensor vocab_sizes = {sizes, DType::i32, {2, 1, 2}};
  offsets(context, {.vocab_sizes = vocab_sizes, .offsets = {wide, DType::i64, {2, 2}}});
  EXPECT_EQ(wide[0][1], 7);
  EXPECT_EQ(wide[1][0], 0);
  EXPECT_EQ(wide[1][1], 2147483647);
  EXPECT_EQ(
      error_of([&] {
        offsets(context, {.vocab_sizes = vocab_sizes, .offsets = {narrow, DType::i32, {2, 2}}});
      }),
      "engram.offsets: tensor 'vocab_sizes': expected sizes of a layer that add up to at most "
      "2147483647 (see index_dtype), got 2147483649 in layer 1");
  const int32_t none[1][1][1] = {{{0}}};
  EXPECT_EQ(error_of([&] {
              offsets(context, {.vocab_sizes = {none, DType::i32, {1, 1, 1}},
                                .offsets = {narrow, DType::i32, {1, 1}}});
            }),
            "engram.offsets: tensor 'vocab_sizes': expected sizes > 0, got 0");
}

}  // namespace
}  // namespace ehc::engram
